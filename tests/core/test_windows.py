"""Windows of stochastic steps: each sample's own, and those that move as training goes on."""

import math
from itertools import groupby
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import normals
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.random import fold_in, key
from fluvial.core.rollout import rollout
from fluvial.core.sigmas import linear, moving_window
from fluvial.core.transitions import bind, cps

GRID = linear(6)
STEPS = torch.tensor([[0, 1], [3, 4], [1, 4], [0, 1]])


def velocity(x: Tensor, sigma: Tensor, step: int) -> Tensor:
    return 0.5 * x - sigma.reshape(-1, *[1] * (x.ndim - 1))


def test_each_sample_follows_its_own_window() -> None:
    x, sampler, keys = (
        normals(0, 4, 3, 5, dtype=torch.float32),
        bind("flow_sde", 0.7, GRID),
        fold_in(key(1), torch.arange(4)),
    )
    together = rollout(velocity, x, GRID, transition=sampler, key=keys, window=STEPS)
    assert torch.equal(together.steps, STEPS)
    for i in range(4):
        one = fold_in(key(1), torch.tensor([i]))
        alone = rollout(velocity, x[i : i + 1], GRID, transition=sampler, key=one, window=STEPS[i].tolist())
        assert torch.equal(alone.final[0], together.final[i])
        assert torch.equal(alone.x[0], together.x[i])
        assert torch.equal(alone.x_next[0], together.x_next[i])
        assert torch.equal(alone.log_prob[0], together.log_prob[i])
    level, level_next = GRID[together.steps].flatten(), GRID[together.steps + 1].flatten()
    step = sampler(level, level_next)
    flat = together.x.flatten(0, 1)
    again = gaussian.log_prob(step, flat, velocity(flat, level, 0), together.x_next.flatten(0, 1))
    assert torch.equal(again, together.log_prob.flatten())


def test_nothing_is_recorded_where_nothing_is_asked_for() -> None:
    """A rollout for an objective on clean samples takes the noise of each sample's window, and records no step."""
    x, sampler = normals(0, 4, 3, dtype=torch.float32), bind("flow_sde", 0.7, GRID)
    recorded = rollout(velocity, x, GRID, transition=sampler, key=key(1), window=STEPS)
    without = rollout(velocity, x, GRID, transition=sampler, key=key(1), window=STEPS, record=())
    assert torch.equal(recorded.final, without.final)
    assert without.log_prob.shape == (4, 0)


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (STEPS[:3], r"expected int64 \[4, S\] on the CPU"),
        (STEPS.float(), r"window is torch.float32"),
        (STEPS.flip(1), "does not rise"),
        (torch.full((4, 1), 6), r"window holds steps \[6\], expected 0 to 5"),
    ],
)
def test_a_window_per_sample_is_checked(window: Tensor, says: str) -> None:
    x, sampler = normals(0, 4, 3, dtype=torch.float32), bind("flow_sde", 0.7, GRID)
    refuses(says, rollout, velocity, x, GRID, transition=sampler, key=key(1), window=window)


def test_samples_may_not_differ_in_their_number_of_recorded_steps() -> None:
    x, ends = normals(0, 2, 3, dtype=torch.float32), torch.tensor([[0, 1], [4, 5]])
    with pytest.raises(ValueError, match=r"window holds steps \[5\], which are deterministic"):
        rollout(velocity, x, GRID, transition=lambda a, b: cps(a, b, eta=0.8), key=key(1), window=ends)
    with pytest.raises(ValueError, match=r"ode has std 0 at step 0 "):
        rollout(velocity, x, GRID, transition=bind("flow_sde", 0.7, GRID), key=key(1), window=ends, record=[0])


def places(rollouts: int, *args: int, **options: float) -> list[tuple[int, int]]:
    starts = [moving_window(done, *args, **options).start for done in range(rollouts)]  # type: ignore[arg-type]
    return [(start, len(list(same))) for start, same in groupby(starts)]


def test_a_progressive_window() -> None:
    """MixGRPO's: 4 of 25 steps within 0 to 22, one step further every 25 rollouts; 300 rollouts reach start 11."""
    assert places(300, 25, 4, 0, 23, every=25) == [(start, 25) for start in range(12)]
    assert moving_window(0, 25, 4, 0, 23, every=25) == range(4)
    assert moving_window(25 * 20, 25, 4, 0, 23, every=25) == range(4)  # start 19 was the last that fits


def test_a_stride_and_the_last_position() -> None:
    assert places(14, 10, 4, every=2, stride=3) == [(0, 2), (3, 2), (6, 2), (0, 2), (3, 2), (6, 2), (0, 2)]
    assert places(12, 10, 4, every=2, stride=3, repeat=False) == [(0, 2), (3, 2), (6, 8)]


def test_an_exponential_decay() -> None:
    """A start beyond the threshold stays for ceil(every exp(-k (start - threshold))) rollouts."""
    stays = [5 if start <= 2 else math.ceil(5 * math.exp(-0.5 * (start - 2))) for start in range(6)]
    assert places(sum(stays), 8, 3, every=5, decay=0.5, decay_from=2) == list(enumerate(stays))
    assert stays[-1] == 2


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "stride": 0}])
def test_a_window_that_cannot_move(options: dict[str, Any]) -> None:
    refuses("expected at least 1", moving_window, 0, 8, 3, **options)
    refuses("moving_window: size is 9", moving_window, 0, 8, 9, every=1)
