"""A rollout in two parts is the rollout of the whole schedule, and parts that do not fit are refused."""

from functools import partial

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import STOCHASTIC, SamplerRow
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.random import key, normal
from fluvial.core.rollout import rollout
from fluvial.core.table import Record

STEPS = 6


def velocity(x: Tensor, sigma: Tensor, step: int) -> Tensor:
    return 0.5 * x - sigma.reshape(-1, 1).to(x.dtype) * (1 + step)


@pytest.mark.parametrize("window", [range(2, 5), range(3, 4), [2, 4]], ids=str)
@pytest.mark.parametrize("row", STOCHASTIC, ids=lambda row: row.name)
def test_two_parts_are_the_whole(row: SamplerRow, window: list[int] | range) -> None:
    grid = row.grid(STEPS)
    still = partial(transitions.ddim, eta=0.0) if row.name == "ddim" else transitions.ode
    run = partial(rollout, velocity, sigmas=grid, transition=row.bind(0.6), deterministic=still, key=key(1))
    x = normal(key(0), (3, 5))
    whole = run(x, window=window, record=Record(velocity=True))
    first = run(x, window=(), record=(), steps=range(2))
    assert first.log_prob.shape == (3, 0)
    rest = run(first.final, window=window, record=Record(velocity=True), steps=range(2, STEPS))
    for one, two in zip(whole, rest, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)  # type: ignore[arg-type]
    assert not torch.equal(first.final, whole.final)


@pytest.mark.parametrize(
    ("steps", "window", "said"),
    [
        (range(2, 8), [3], "steps is range(2, 8), expected a contiguous range within 0 to 6"),
        (range(0, 6, 2), [2], "expected a contiguous range"),
        (range(3, 1), [2], "expected a contiguous range"),
        (range(2, 6), [1, 3], "window holds steps [1], expected 2 to 5, the steps taken"),
        (range(2), [0, 3], "window holds steps [3], expected 0 to 1, the steps taken"),
    ],
)
def test_a_part_that_does_not_fit(steps: range, window: list[int], said: str) -> None:
    grid = STOCHASTIC[0].grid(STEPS)
    with pytest.raises(ValueError, match="rollout: ") as raised:
        rollout(velocity, torch.ones(1, 2), grid, transition=STOCHASTIC[0].bind(0.5), key=key(0), window=window, steps=steps)
    assert said in str(raised.value)


def test_a_recorded_step_lies_within_the_part() -> None:
    run = partial(rollout, velocity, torch.ones(1, 2), torch.linspace(1, 0, STEPS + 1), key=key(0), steps=range(4))
    step, record = partial(transitions.dance_sde, eta=0.5), Record(steps=[1, 5], form="unscaled")
    refuses(r"record holds steps \[5\], expected 0 to 3", run, transition=step, record=record)
