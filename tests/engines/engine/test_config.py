"""The learning rate over the updates, and the settings that are refused."""

import math
from typing import Any, cast, get_args

import pytest
import torch
from helpers.tiny_models import Net
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.engine.config import UNUSED, EngineConfig, OptimizerConfig, OptimizerName, lr_factor
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.optimizers import OPTIMIZERS
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError


def rates(*, updates: int | None, count: int | None = None, **settings: Any) -> list[float]:
    """Return the factor of each update."""
    config = OptimizerConfig(**settings)
    factor = lr_factor(OPTIMIZERS["sgd"].build([torch.nn.Parameter(torch.zeros(1))], config), config, updates=updates)
    return [factor(done) for done in range(count or (updates or 0) + 1)]


@given(updates=st.integers(1, 60), warmup=st.integers(0, 60), floor=st.floats(0, 1), cosine=st.booleans())
def test_the_schedule_is_its_formula(updates: int, warmup: int, floor: float, cosine: bool) -> None:
    """Linear up to the peak, which the last update of the warm-up has; then half a cosine to the floor, or 1."""
    warmup = min(warmup, updates)
    schedule: dict[str, Any] = {"schedule": "cosine", "min_lr_ratio": floor} if cosine else {}
    found = rates(updates=updates, warmup=warmup, **schedule)
    for done, factor in enumerate(found):
        peak = max(warmup - 1, 0)
        if done < warmup:
            expected = (done + 1) / warmup
        elif cosine:
            through = (done - peak) / (updates - peak)
            expected = floor + (1 - floor) * (1 + math.cos(math.pi * through)) / 2
        else:
            expected = 1.0
        assert factor == pytest.approx(expected, abs=1e-9)


@given(updates=st.integers(1, 20), warmup=st.integers(0, 20), cosine=st.booleans())
def test_no_update_is_wasted(updates: int, warmup: int, cosine: bool) -> None:
    """No update has learning rate 0, however short the run; the first is the peak if the warm-up is 1 update or none."""
    found = rates(updates=updates, warmup=warmup, schedule="cosine" if cosine else "constant")[:updates]
    assert min(found) > 0
    assert warmup > 1 or found[0] == 1


def test_known_schedules() -> None:
    """The recipes' starts at the peak of the first update, to the bit; a warm-up may be a fraction of all, rounded up."""
    assert rates(updates=7, schedule="cosine") == [max(0.0, 0.5 * (1 + math.cos(math.pi * n / 7))) for n in range(8)]
    assert rates(updates=10, warmup=0.25) == rates(updates=10, warmup=3)
    floored = rates(updates=8, schedule="cosine", min_lr_ratio=0.1)
    assert min(floored) == floored[-1] == pytest.approx(0.1)


def test_only_a_constant_schedule_needs_no_number_of_updates() -> None:
    """The message names the field that depends on it."""
    assert rates(updates=None, count=4, warmup=2) == [0.5, 1, 1, 1]
    for field, value in (("schedule", "cosine"), ("warmup", 0.1)):
        with pytest.raises(ValueError, match=f"optimizer.{field} is {value!r}: it depends on the number of updates;"):
            rates(updates=None, **cast(Any, {field: value}))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": -1.0}, "is -1.0, expected"),
        ({"lr": float("nan")}, "is nan, expected"),
        ({"betas": (0.9, 1.0)}, "is .*, expected below 1"),
        ({"betas": (0.9, 1.5)}, "is 1.5"),
        ({"betas": (0.9,)}, r"is \(0.9,\), expected two numbers"),
        ({"eps": 0.0}, "is 0.0, expected"),
        ({"ema_decay": 1.5}, "is 1.5, expected"),
        ({"ema_decay": 1.0}, "is .*, expected below 1"),
        ({"ema_interval": 4}, "has no effect with optimizer.ema_decay 0"),
        ({"ema_repeats": 2}, "has no effect with optimizer.ema_decay 0"),
        ({"ema_warmup": False}, "has no effect with optimizer.ema_decay 0"),
        ({"min_lr_ratio": 0.1}, "has no effect with optimizer.schedule constant"),
        ({"max_grad_norm": 0.0}, "is 0.0, expected"),
        ({"warmup": -1}, "is -1, expected"),
        ({"warmup": 3.5}, "is 3.5, expected a whole number of updates, or a fraction of all below 1"),
        ({"schedule": "linear"}, "is 'linear', expected .*constant.*cosine"),
        ({"schedule": "cosin"}, "is 'cosin', .*cosine"),
        ({"name": "adam"}, "is 'adam', .*adamw"),
        ({"eps": 1e-6, "name": "sgd"}, "has no effect with optimizer.name sgd, which has none"),
        ({"betas": (0.5, 0.9), "name": "adafactor"}, "has no effect with optimizer.name adafactor, which has none"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], says: str) -> None:
    """When the config is built, in one line with the field's name."""
    with pytest.raises(ValueError, match=rf"optimizer(\.|: ){next(iter(wrong))} {says}") as error:
        OptimizerConfig(**wrong)
    assert "\n" not in str(error.value)


def test_the_table_has_every_optimizer() -> None:
    """A row of the table and of the unused settings for each accepted name."""
    assert set(OPTIMIZERS) == set(get_args(OptimizerName)) > set(UNUSED)
    assert OptimizerConfig().name in OPTIMIZERS


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compile": True, "checkpointing": "selective"}, "engine.checkpointing is 'selective', expected none, block or host"),
    ({"checkpointed": 2}, "engine.checkpointed has no effect with engine.checkpointing none"),
    ({"checkpointing": "block", "checkpointed": 3}, "engine.checkpointed is 3, expected at most the 2 blocks"),
    ({"base": "int8", "offload": "always"}, "engine.offload is 'always'.*engine.base is int8"),
    ({"base": "nf4"}, "engine.base is 'nf4': no linear layer .* is frozen"),
    ({"replicas": 2}, "replicas is 2, expected a divisor of the 1 ranks"),
    ({"context_parallel": 2}, "context_parallel is 2, expected a divisor of the 1 ranks"),
    ({"attention": "native"}, "attention is 'native': Net does not choose"),
    ({"grad_sync": "step"}, "engine.grad_sync is 'step', expected .*last.*every"),
    ({"optimizer": "adafactor", "masters": "bfloat16"}, "optimizer.name is 'adafactor', expected adamw or sgd.*engine.mast"),
]


@pytest.mark.parametrize(("settings", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_sharding_is_refused(one: World, settings: dict[str, Any], says: str) -> None:
    """When it is built, or where it does not fit the module, the optimizer or the ranks."""
    net, (name, sharding) = Net(), (settings.get("optimizer", "adamw"), {**settings})
    sharding.pop("optimizer", None)
    with pytest.raises(ValueError, match=says) as error:
        Engine(net, list(net.blocks), OptimizerConfig(name), one, updates=1, sharding=EngineConfig(**sharding))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting", [{"checkpointing": "host"}, {"checkpointing": "block"}, {"compile": True}], ids=str)
def test_a_network_without_blocks_has_nothing_to_act_on(one: World, setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"engine.{next(iter(setting))} is .*: Linear has no repeated blocks"):
        Engine(torch.nn.Linear(2, 2), world=one, sharding=EngineConfig(**setting))
