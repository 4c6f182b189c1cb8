"""Groups without a valid reward: which they are, and how many of a rollout may be left out."""

import math

import pytest
import torch

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.scoring.gather import check_invalid, find_kept_samples

NAN = math.nan


def test_a_group_is_left_out_as_a_whole() -> None:
    """Also where another reward of another sample is the invalid one."""
    rewards = torch.tensor([[1.0, 1.0], [1.0, NAN], [1.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, 1.0]])
    kept = find_kept_samples(rewards, 2)
    assert kept.tolist() == [False, False, True, True, False, False]
    assert find_kept_samples(torch.zeros(4, 0), 2).all()


@pytest.mark.parametrize(("bad", "most"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.9), (1, 0.2), (2, 0.25), (1, 0.0), (4, 0.9)])
def test_what_is_tolerated_is_warned_of_and_more_ends_the_run(one: World, bad: int, most: float) -> None:
    """With the reason, the number of groups and what becomes of them; where all are valid it is silent."""
    rewards, says = torch.ones(8, 1), f"^why; {bad} of the 4 groups of the rollout have no valid reward"
    rewards[: 2 * bad : 2] = NAN

    def check() -> dict[str, int]:
        return check_invalid(rewards, ["why", "other"] if bad else [], group=2, most=most, world=one)

    if bad / 4 > most:
        with pytest.raises(RunError, match=rf"{says}, above rollout.max_invalid {most:g}$"):
            check()
    elif bad:
        with pytest.warns(UserWarning, match=f"{says} and are left out"):
            assert check() == {"samples": bad, "groups": bad}
    else:
        assert check() == {"samples": 0, "groups": 0}
