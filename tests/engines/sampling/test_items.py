"""Items that are dropped and moved: every rank ends up with as many, and all of them are still there once."""

from typing import Any

import pytest
from helpers import launch
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.sampling.items import transfers


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_moves_level_the_ranks(counts: list[int]) -> None:
    """Nothing is made or lost, shares differ by one at most, and nobody both gives and takes."""
    plan = transfers(counts)
    after = [count - sum(plan[rank]) + sum(row[rank] for row in plan) for rank, count in enumerate(counts)]
    assert sum(after) == sum(counts)
    assert max(after) - min(after) <= 1
    for rank in range(len(counts)):
        gives, takes = sum(plan[rank]), sum(row[rank] for row in plan)
        assert not (gives and takes)
        assert 0 <= gives <= counts[rank]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pairs_move_whole(ranks: int) -> None:
    """On real ranks: each pair with its own tensors and its own conditioning, once."""
    for case in launch.on_ranks(ranks, "workers.moving:move")[0]:
        found: list[list[Any]] = [pair for rank in case["found"] for pair in rank]
        assert sorted(found) == sorted(case["expected"])
        assert max(map(len, case["found"])) - min(map(len, case["found"])) <= 1
