"""Groups without a valid reward: which they are, and how many of a rollout may be left out."""

import math

import pytest
import torch

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.scoring.invalid import check_invalid, find_kept_samples

NAN = math.nan


def test_a_group_is_left_out_as_a_whole() -> None:
    """Also where another reward of another sample is the invalid one."""
    rewards = torch.tensor([[1.0, 1.0], [1.0, NAN], [1.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, 1.0]])
    kept = find_kept_samples(rewards, 2)
    assert kept.tolist() == [False, False, True, True, False, False]
    assert find_kept_samples(torch.zeros(4, 0), 2).all()


@pytest.mark.parametrize(("bad", "most"), [(1, 0.25), (2, 0.5), (3, 0.9)])
def test_what_is_tolerated_is_warned_of(one: World, bad: int, most: float) -> None:
    """With the reason, the number of groups and what becomes of them."""
    rewards = torch.ones(8, 1)
    rewards[: 2 * bad : 2] = NAN
    with pytest.warns(
        UserWarning, match=rf"^why; {bad} of the 4 groups of the rollout have no valid reward and are left out"
    ):
        found = check_invalid(rewards, ["why", "other"], group=2, most=most, world=one)
    assert found == {"samples": bad, "groups": bad}


@pytest.mark.parametrize(("bad", "most"), [(1, 0.2), (2, 0.25), (1, 0.0), (4, 0.9)])
def test_more_ends_the_run(one: World, bad: int, most: float) -> None:
    """In one line."""
    rewards = torch.ones(8, 1)
    rewards[: 2 * bad] = NAN
    says = rf"^why; {bad} of the 4 groups of the rollout have no valid reward, above rollout.max_invalid {most:g}$"
    with pytest.raises(RunError, match=says):
        check_invalid(rewards, ["why"], group=2, most=most, world=one)


def test_all_valid_is_silent(one: World) -> None:
    """And costs no collective."""
    assert check_invalid(torch.ones(4, 2), [], group=2, most=0.0, world=one) == {"samples": 0, "groups": 0}
