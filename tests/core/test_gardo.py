"""GARDO: diverse advantages, disagreement of ranks and its gate, by loops in float64."""

import math

import pytest
import torch
from helpers.tables import normals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fluvial.core.advantages import group_advantages
from fluvial.core.gardo import DOUBTED, diverse_advantages, doubt_gate, rank_doubt


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 4))
def test_good_samples_count_by_their_distance_to_the_nearest_of_their_group(seed: int, batch: int, groups: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    reward, features = (torch.randn(batch, *rest, generator=drawn, dtype=torch.float64) for rest in ((), (3,)))
    group = torch.randint(0, groups, (batch,), generator=drawn)
    got = diverse_advantages(reward, features, group)
    for i in range(batch):
        members = [j for j in range(batch) if group[j] == group[i]]

        def distance(i: int, members: list[int] = members) -> float:
            cosines = [float(torch.cosine_similarity(features[i], features[j], dim=0)) for j in members if j != i]
            return min((1 - cosine for cosine in cosines), default=1.0)

        centred = float(reward[i]) - math.fsum(float(reward[j]) for j in members) / len(members)
        mean = math.fsum(map(distance, members)) / len(members)
        factor = distance(i) / mean if centred > 0 else 1.0
        assert float(got[i]) == pytest.approx(centred * factor, rel=1e-6, abs=1e-9)


def test_equal_features_leave_the_advantages_of_dr_grpo() -> None:
    """So do those of a pair, which are as far from each other, and a scale of the features changes nothing."""
    reward, group, features = normals(0, 6), torch.tensor([0, 1, 0, 1, 0, 1]), normals(1, 6, 4)
    plain = group_advantages(reward, group, scale="none")
    assert_close(diverse_advantages(reward, torch.ones(6, 4).double(), group), plain)
    assert_close(
        diverse_advantages(reward, features, torch.arange(6) // 2),
        group_advantages(reward, torch.arange(6) // 2, scale="none"),
    )
    assert_close(diverse_advantages(reward, features * 3, group), diverse_advantages(reward, features, group))
    assert not torch.allclose(diverse_advantages(reward, features, group), plain)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 3))
def test_a_reward_is_doubted_where_the_others_rank_a_sample_lower(seed: int, batch: int, others: int) -> None:
    """By ranks from 1, the mean of those that are equal; the two signs are opposite, and the sum is 0."""
    drawn = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 5, (batch, 1 + others), generator=drawn).double()

    def rank(column: torch.Tensor, i: int) -> float:
        ordered = sorted(column.tolist(), reverse=True)
        places = [place for place, value in enumerate(ordered, start=1) if value == column[i]]
        return sum(places) / len(places)

    over, under = (rank_doubt(table[:, 0], table[:, 1:], doubted=doubted) for doubted in DOUBTED)
    for i in range(batch):
        mean = sum(rank(table[:, 1 + k], i) for k in range(others)) / others
        assert float(over[i]) == pytest.approx((mean - rank(table[:, 0], i)) / batch, abs=1e-12)
    assert torch.equal(over, -under)
    assert abs(float(over.sum())) < 1e-12


def test_what_one_reward_alone_likes_is_overrated() -> None:
    reward, other = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([[0.0], [2.0], [3.0]])
    assert_close(rank_doubt(reward, other), torch.tensor([2 / 3, 0.0, -2 / 3]))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.77, 1.0])
def test_the_gate_takes_a_share_of_the_doubtful(share: float) -> None:
    """Those at or above the quantile of a doubt of 0 or more; the share 1 is all of them."""
    doubt = torch.cat([torch.arange(8) / 10, -torch.arange(1, 5) / 10]).double()
    gate = doubt_gate(doubt, share=share)
    count = int(gate.sum())
    assert float(doubt[gate == 1].min()) >= float(torch.quantile(doubt[:8], 1 - share)) - 1e-12
    assert float(doubt_gate(-torch.ones(3), share=share).sum()) == 0
    assert torch.equal(gate, (torch.arange(12) < 8).double() * (torch.arange(12) >= 8 - count))
    assert count == math.floor(7 * share + 1e-9) + 1
    assert float(doubt_gate(torch.zeros(3), share=share).sum()) == 3
    assert doubt_gate(doubt[:0], share=share).shape == (0,)
    assert diverse_advantages(doubt[:0], normals(0, 0, 4), torch.arange(0)).shape == (0,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: diverse_advantages(torch.ones(2), torch.ones(3, 4), torch.zeros(2).long()),
            r"features have shape \[3, 4\]",
        ),
        (lambda: rank_doubt(torch.ones(2), torch.ones(2, 0)), r"others have shape \[2, 0\], expected \[2, K\]"),
        (lambda: doubt_gate(torch.ones(2), share=0.0), "share is 0"),
        (lambda: doubt_gate(torch.tensor([torch.nan]), share=0.5), "doubt is not finite"),
    ],
)
def test_what_raises(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
