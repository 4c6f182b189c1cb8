"""Choices: every value of every union is read back from JSON and from flags, and what has no meaning cannot be written."""

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from fluvial.core.transitions import dance_sde
from fluvial.engines.choices import find_variant, list_kinds, list_variant_fields
from fluvial.engines.cli.parse import parse_config
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.record import CONVERTER, as_record, read_record
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.noising import Levels, NoisingConfig, UniformLevels
from fluvial.engines.sampling.samplers import SamplerChoice, Stochastic
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import (
    AllRecorded,
    AllSteps,
    OneRecorded,
    RandomWindow,
    Trained,
    Window,
)


@dataclass(frozen=True)
class Chosen:
    """One of each choice.

    Args:
        window: Stochastic steps.
        trained: Trained steps.
        sampler: Sampler.
        levels: Noise levels.
    """

    window: Window = field(default_factory=AllSteps)
    trained: Trained = field(default_factory=AllRecorded)
    sampler: SamplerChoice = field(default_factory=Stochastic)
    levels: Levels = field(default_factory=lambda: NoisingConfig().levels)


UNIONS: dict[str, Any] = {"window": Window, "trained": Trained, "sampler": SamplerChoice, "levels": Levels}
PLACES = {
    "window": "method.sampling.window",
    "trained": "method.trained",
    "sampler": "method.sampling.sampler",
    "levels": "method.noising.levels",
}
EVERY = [(name, kind) for name, union in UNIONS.items() for kind in list_kinds(union)]
NUMBERS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 9),
    float: st.floats(0.001, 0.99),
    NoneType: st.none(),
    tuple[int, ...]: st.lists(st.integers(0, 9), unique=True).map(lambda steps: tuple(sorted(steps))),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type, most of which are accepted."""
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*map(values_of, get_args(kind)))
    return st.sampled_from(get_args(kind)) if get_origin(kind) is Literal else NUMBERS[kind]


def drawn(data: st.DataObject, name: str, kind: str) -> Any:
    """Return a value of a kind, with any of its settings that are accepted."""
    variant, make = find_variant(UNIONS[name], kind, name)
    hints = get_type_hints(variant)
    found = {each.name: hints[each.name] for each in list_variant_fields(variant)}
    try:
        return make(**{key: tail(data) if is_dataclass(of) else data.draw(values_of(of)) for key, of in found.items()})
    except ValueError:
        needed = {"size": 2, "samples": 2, "fraction": 0.5}
        return make(**{each.name: needed[each.name] for each in list_variant_fields(variant) if each.name in needed})


def tail(data: st.DataObject) -> Tail:
    """Return settings of the steps after a window."""
    hints = get_type_hints(Tail)
    return Tail(**{each.name: data.draw(values_of(hints[each.name])) for each in fields(Tail)})


def flags(value: Any, prefix: str) -> list[str]:
    """Return the words that a value is typed with."""
    words = [f"--{prefix}", value.kind] if hasattr(value, "kind") else []
    for each in list_variant_fields(type(value)) if words else fields(value):
        found, flag = getattr(value, each.name), f"{prefix}.{each.name}".replace("_", "-")
        if is_dataclass(found):
            words += flags(found, flag)
        elif isinstance(found, bool):
            group, _, name = flag.rpartition(".")
            words.append(f"--{flag}" if found else f"--{group}.no-{name}")
        else:
            words += [f"--{flag}", *map(str, found if isinstance(found, tuple) else (found,))]
    return words


@pytest.mark.parametrize(("name", "kind"), EVERY)
@settings_of_hypothesis(max_examples=15)
@given(st.data())
def test_every_value_is_read_back_from_json(name: str, kind: str, data: st.DataObject) -> None:
    """As an object with its kind."""
    value = drawn(data, name, kind)
    record = json.loads(json.dumps(CONVERTER.unstructure(Chosen(**{name: value}))))
    assert record[name]["kind"] == kind
    assert CONVERTER.structure(record, Chosen) == Chosen(**{name: value})


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_every_value_is_read_back_from_flags(name: str, kind: str) -> None:
    """Whatever the kind that the configuration has without them."""
    starts = [*{type(start): start for start in (_example(name, other, 0) for other in list_kinds(UNIONS[name]))}.values()]
    for seed in range(3):
        value = _example(name, kind, seed)
        for start in starts if seed == 2 else starts[:1]:
            found = parse_config(replace(Chosen(), **{name: start}), "run", flags(value, name))
            assert getattr(found, name) == value


def _example(name: str, kind: str, seed: int) -> Any:
    """Return one of three values of a kind: with its defaults, and with others."""
    variant, make = find_variant(UNIONS[name], kind, name)
    base: dict[str, Any] = {"size": 2, "samples": 2, "fraction": 0.5}
    value = make(**{each.name: base[each.name] for each in list_variant_fields(variant) if each.name in base})
    others: list[dict[str, Any]] = [
        {},
        {"low": 1, "high": 4, "stride": 2, "eta": 0.3, "solver": "unipc", "skip": 1, "repeat": False},
        {"low": 2, "share_prefix": True, "every": 3, "decay": 0.5, "decay_from": 1, "draw": "run", "highest": 7},
    ]
    if issubclass(variant, UniformLevels):
        others[1:] = [{"low": 0.25}, {"high": 0.5}]
    if variant is OneRecorded:
        others[1:] = [{"odds": "late"}, {"draw": "rollout"}]
    known = {each.name for each in list_variant_fields(variant)}
    return replace(value, **{key: setting for key, setting in others[seed].items() if key in known})


@pytest.mark.parametrize("name", UNIONS)
def test_a_wrong_kind_is_one_line_with_the_nearest(name: str) -> None:
    """On the command line and in a file."""
    kind = list_kinds(UNIONS[name])[0]
    with pytest.raises(UsageError, match=f"--{name} is '{kind}x', expected one of .*; did you mean '{kind}'") as typed:
        parse_config(Chosen(), "run", [f"--{name}", f"{kind}x"])
    place = PLACES[name].split(".")
    record = as_record(TrainConfig(Path("x"), method=Nft() if name == "levels" else Grpo(), train="lora"))
    *parents, last = place
    table = record
    for parent in parents:
        table = table[parent]
    table[last] = {"kind": f"{kind}x"}
    with pytest.raises(UsageError, match=rf"did you mean '{kind}'\? @ run\.{PLACES[name]}") as read:
        read_record(record)
    assert "\n" not in f"{typed.value}{read.value}"


def test_a_kind_alone_has_its_defaults() -> None:
    """In a file; a kind with a field that has no default needs an object."""
    record = as_record(TrainConfig(Path("x"), method=Grpo()))
    record["method"]["sampling"] |= {"window": "all", "sampler": "dance_sde"}
    assert read_record(record).method.sampling.sampler == Stochastic("dance_sde")
    record["method"]["sampling"]["window"] = "random"
    with pytest.raises(UsageError, match=r"misses the field size @ run\.method\.sampling\.window"):
        read_record(record)
    record["method"]["sampling"]["window"] = {"kind": "all", "size": 3}
    with pytest.raises(UsageError, match=r"has unknown fields size @ run\.method\.sampling\.window"):
        read_record(record)
    record["method"]["sampling"]["window"] = 5
    with pytest.raises(UsageError, match=r"is 5, expected an object with a kind, one of all, .* @ run\.method\.sampling\."):
        read_record(record)


def test_a_value_of_no_kind_is_refused() -> None:
    """As the sampler's name alone would be."""
    for changes in ({"sampler": "ode"}, {"window": 5}):
        with pytest.raises(TypeError, match=rf"sampling\.{next(iter(changes))} is an? \w+, expected \w+ or "):
            SamplingConfig(**changes)


@given(st.sampled_from(["eta", "size"]), st.sampled_from([math.nan, math.inf, -1]))
def test_single_values_are_checked(name: str, value: float) -> None:
    """Where they are written."""
    with pytest.raises((ValueError, TypeError), match=rf"rollout\.(sampler|window)\.{name}|{name}"):
        Stochastic(eta=value) if name == "eta" else RandomWindow(value)  # type: ignore[arg-type]


def test_a_function_stays_the_sampler_of_flags_that_choose_no_other() -> None:
    """It has no name that flags could give back."""
    start = replace(Chosen(), sampler=Stochastic(dance_sde, 0.5))
    assert parse_config(start, "run", ["--sampler.eta", "0.3"]).sampler == Stochastic(dance_sde, 0.3)
