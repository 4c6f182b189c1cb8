"""The learning rate over the updates."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.fsdp.optimizer import OptimizerConfig, adamw, lr_factor


def rates(*, updates: int, **settings: Any) -> list[float]:
    """The factor before each update."""
    config = OptimizerConfig(**settings)
    parameter = torch.nn.Parameter(torch.zeros(1))
    factor = lr_factor(adamw([parameter], config), config, updates=updates)
    return [factor(done) for done in range(updates + 1)]


@given(updates=st.integers(1, 60), warmup=st.integers(0, 60), floor=st.floats(0, 1), cosine=st.booleans())
def test_the_schedule_is_its_formula(updates: int, warmup: int, floor: float, cosine: bool) -> None:
    """Linear from 0, then the half cosine from 1 to the floor, or 1."""
    warmup = min(warmup, updates)
    found = rates(updates=updates, warmup=warmup, min_lr_ratio=floor, schedule="cosine" if cosine else "constant")
    for done, factor in enumerate(found):
        if done < warmup:
            expected = done / warmup
        elif cosine:
            through = (done - warmup) / max(1, updates - warmup)
            expected = floor + (1 - floor) * (1 + math.cos(math.pi * through)) / 2
        else:
            expected = 1.0
        assert factor == pytest.approx(expected, abs=1e-9)


def test_a_warm_up_may_be_a_fraction() -> None:
    """Of all updates, rounded up."""
    assert rates(updates=10, warmup_ratio=0.25) == rates(updates=10, warmup=3)
    with pytest.raises(ValueError, match=r"warmup is 3 and warmup_ratio 0.5, expected one of the two"):
        OptimizerConfig(warmup=3, warmup_ratio=0.5)


def test_the_floor_is_reached_and_not_passed() -> None:
    found = rates(updates=8, schedule="cosine", min_lr_ratio=0.1)
    assert found[-1] == pytest.approx(0.1)
    assert min(found) == found[-1]
