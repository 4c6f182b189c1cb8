"""Settings with a list of values: every one of them refuses another value in Python, as on the command line."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import recipes
from fluvial.engines.run.config import TrainConfig

RECIPES = ("grpo", "nft", "dpo", "ddpo")


def choices(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield each configuration inside `config` with each of its fields that is a plain `Literal` of strings."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if get_origin(hints[field.name]) is Literal and all(isinstance(one, str) for one in get_args(hints[field.name])):
            yield config, field.name
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from choices(value)


FIELDS = {
    f"{type(config).__name__}.{name}": (config, name)
    for recipe in RECIPES
    for config, name in choices(getattr(recipes, recipe)())
}


def test_the_table_knows_the_fields_that_once_were_silent() -> None:
    """A misspelt schedule, training method or checkpointing once trained something else."""
    silent = {"OptimizerConfig.schedule", "TrainConfig.train", "MachineConfig.checkpointing"}
    assert silent < set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_another_value_is_refused_with_the_accepted_ones(name: str) -> None:
    """The message names the field, the value and every accepted value."""
    config, field = FIELDS[name]
    with pytest.raises(ValueError, match="nonsense") as refused:
        dataclasses.replace(config, **{field: "nonsense"})
    message = str(refused.value)
    assert field in message
    assert all(str(value) in message for value in get_args(get_type_hints(type(config))[field]))


def test_a_method_of_training_that_does_not_exist() -> None:
    """`train="qlora"` says what there is."""
    with pytest.raises(ValueError, match=r"train is 'qlora', expected .*full.*lora"):
        TrainConfig(out=Path("run"), train="qlora", method=Grpo())  # type: ignore[arg-type]
