"""Advantages against a loop one would write, and the invariances that make them advantages."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from helpers.tables import DTYPES, normals
from helpers.tolerances import COMPUTE_DTYPE, tolerance
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fluvial.core.advantages import (
    SCALES,
    Scale,
    edge_advantages,
    group_advantages,
    multi_reward_advantages,
    turning_point_gains,
)

every_scale = pytest.mark.parametrize("scale", SCALES)
# Any integers name groups; a few, so that groups have several members.
group_ids = st.sampled_from([-(2**40), -1, 0, 1, 7, 2**62])
pairs = st.lists(st.tuples(st.floats(-100, 100), group_ids), min_size=1, max_size=24)


def tensors(samples: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    rewards, groups = zip(*samples, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)


def reference(reward: Tensor, group: Tensor, *, scale: Scale, eps: float = 1e-4) -> Tensor:
    values, names = reward.tolist(), group.tolist()
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    result = []
    for value, name in zip(values, names, strict=True):
        members = [other for other, of in zip(values, names, strict=True) if of == name]
        centred = value - math.fsum(members) / len(members)
        group_spread = statistics.stdev(members) if len(members) > 1 else 0.0
        result.append(centred / {"group": group_spread + eps, "batch": spread + eps, "none": 1.0}[scale])
    return torch.tensor(result, dtype=torch.float64)


# Rewards up to 100 over eps = 1e-4: an error of the mean is magnified by at most their quotient.
LIMIT = tolerance("advantage", torch.float64, condition=100 / 1e-4)


@every_scale
@given(samples=pairs)
def test_advantages_are_those_of_a_plain_loop(scale: Scale, samples: list[tuple[float, int]]) -> None:
    reward, group = tensors(samples)
    assert_close(group_advantages(reward, group, scale=scale), reference(reward, group, scale=scale), **LIMIT)
    got = group_advantages(reward, group, scale=scale, eps=0.5)
    assert_close(got, reference(reward, group, scale=scale, eps=0.5), **LIMIT)


@given(samples=pairs, ddof=st.sampled_from([0, 1]))
def test_the_standard_deviation_is_numpys(samples: list[tuple[float, int]], ddof: int) -> None:
    reward, group = tensors(samples)
    values, names = reward.numpy(), group.numpy()
    centred = values - np.array([values[names == name].mean() for name in names])
    batch = values.std(ddof=ddof) if len(values) > ddof else 0.0
    got = group_advantages(reward, group, scale="batch", ddof=ddof)
    assert_close(got, torch.from_numpy(centred / (batch + 1e-4)), **LIMIT)
    spread = [values[names == name].std(ddof=ddof) if (names == name).sum() > ddof else 0.0 for name in names]
    got = group_advantages(reward, group, ddof=ddof)
    assert_close(got, torch.from_numpy(centred / (np.array(spread) + 1e-4)), **LIMIT)
    both = multi_reward_advantages(reward[:, None], torch.ones(1), group, ddof=ddof)
    total = got.numpy()  # of mean 0
    deviation = got.numpy().std(ddof=ddof) if len(total) > ddof else 0.0
    assert_close(both, torch.from_numpy(total / (deviation + 1e-4)), **LIMIT)


def test_the_defaults_are_those_of_grpo() -> None:
    reward, group = torch.tensor([1.0, 2.0, 5.0, 4.0]).double(), torch.tensor([0, 0, 1, 1])
    half, std = 0.5, math.sqrt(0.5)  # of (1, 2) and, negated, of (5, 4)
    want = torch.tensor([-half, half, half, -half]).double() / (std + 1e-4)
    assert_close(group_advantages(reward, group), want, **tolerance("advantage", torch.float64))
    reward, group = normals(0, 20)[::2], (torch.arange(20) % 3)[::2]
    assert torch.equal(group_advantages(reward, group), group_advantages(reward.contiguous(), group.contiguous()))


@every_scale
@pytest.mark.parametrize("size", [0, 1, 41, 1271])
def test_sizes(scale: Scale, size: int) -> None:
    reward, group = normals(size, size), torch.arange(size) % 7
    assert_close(group_advantages(reward, group, scale=scale), reference(reward, group, scale=scale), **LIMIT)
    one_each = group_advantages(reward, torch.arange(size), scale=scale)
    assert torch.equal(one_each, torch.zeros(size, dtype=torch.float64))


@every_scale
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(scale: Scale, dtype: torch.dtype) -> None:
    # Computed in float64: a large common offset costs no precision.
    reward, group = (1000 + normals(0, 40)).to(dtype), torch.arange(40, dtype=torch.int32) % 5
    got = group_advantages(reward, group, scale=scale)
    assert got.dtype == COMPUTE_DTYPE[dtype]
    want = reference(reward.double(), group, scale=scale)
    eps = torch.finfo(got.dtype).eps
    assert_close(got.double(), want, rtol=max(eps, 1e-9), atol=1e-9)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    reward, group = torch.tensor([0.0, bad, 1.0, bad]), torch.zeros(4, dtype=torch.int64)
    refuses(r"group_advantages: rewards are not finite at indices \[1, 3\]", group_advantages, reward, group)
    rewards = torch.stack([reward, torch.zeros(4)], dim=1)
    refuses(r"multi_reward_advantages: .* indices \[\[1, 0\], \[3", multi_reward_advantages, rewards, torch.ones(2), group)


@every_scale
@given(samples=pairs, weights=st.lists(st.floats(-3, 3), min_size=1, max_size=3))
def test_several_rewards(scale: Scale, samples: list[tuple[float, int]], weights: list[float]) -> None:
    reward, group = tensors(samples)
    rewards = torch.stack([reward, *(normals(k, len(reward)) for k in range(1, len(weights)))], dim=1)
    total = sum(w * reference(column, group, scale=scale) for w, column in zip(weights, rewards.T, strict=True))
    assert isinstance(total, Tensor)
    spread = statistics.stdev(total.tolist()) if len(total) > 1 else 0.0
    want = (total - statistics.fmean(total.tolist())) / (spread + 1e-4)
    got = multi_reward_advantages(rewards, torch.tensor(weights, dtype=torch.float64), group, scale=scale)
    # Normalised twice, so an error is magnified by 1 / eps twice at worst.
    assert_close(got, want, **tolerance("advantage", torch.float64, condition=100 / 1e-4 / 1e-4))


def test_no_reward_drowns_another() -> None:
    first, group = normals(0, 24), torch.arange(24) % 4
    second = normals(1, 24)
    balanced, drowned = (
        multi_reward_advantages(torch.stack([first * size, second], dim=1), torch.ones(2), group, eps=1e-12)
        for size in (1, 1e6)
    )
    assert_close(balanced, drowned, rtol=1e-8, atol=1e-8)
    assert balanced.dtype == torch.float64
    low = multi_reward_advantages(torch.stack([first, second], dim=1).bfloat16(), torch.ones(2), group)
    assert low.dtype == torch.float32


def plain_turning_points(rewards: Tensor, *, balanced: bool) -> Tensor:
    """Return the gain of each step as a loop over samples and steps would.

    With turning points of one sign alone all are kept, as in YunzeTong/TurningPoint-GRPO
    (scripts/my_train_sd3_fast_with_op3.py), which balances where there are both.
    """
    total, found = [float(row[-1] - row[0]) for row in rewards], dict[tuple[int, int], float]()
    for i, row in enumerate(rewards.tolist()):
        for k, (before, after) in enumerate(itertools.pairwise(row)):
            same = (after - before) * (row[-1] - after) > 0
            turned = k == 0 or (row[k] - row[k - 1]) * total[i] < 0 < (after - before) * total[i]
            if same and turned:
                found[i, k] = row[-1] - before
    sides = [
        sorted((key for key in found if total[key[0]] * sign > 0), key=lambda key: -abs(total[key[0]])) for sign in (1, -1)
    ]
    taken = [key for side in sides for key in (side[: min(map(len, sides))] if balanced and all(sides) else side)]
    gains = rewards.diff(dim=1)
    for key in taken:
        gains[key] = found[key]
    return gains


@given(seed=st.integers(0, 10_000), steps=st.integers(1, 6), balanced=st.booleans())
def test_turning_points_are_those_of_a_plain_loop(seed: int, steps: int, balanced: bool) -> None:
    rewards = normals(seed, 8, steps + 1)
    rewards[::2, 1] = rewards[::2, 0]  # a step without a gain does not turn
    got = turning_point_gains(rewards, balanced=balanced)
    assert_close(got.gain, plain_turning_points(rewards, balanced=balanced))
    total = (rewards[:, -1:] - rewards[:, :1]).expand_as(got.turning)[got.turning]
    better, worse = int((total > 0).sum()), int((total < 0).sum())
    assert not balanced or better == worse or 0 in (better, worse)
    assert_close(torch.where(got.turning, rewards.diff(dim=1), got.gain).sum(1), rewards[:, -1] - rewards[:, 0])


def test_a_path_without_gains_has_no_turning_point() -> None:
    flat = turning_point_gains(torch.ones(3, 5), balanced=False)
    assert not flat.gain.any()
    assert not flat.turning.any()
    for shape in ((3,), (3, 1)):
        refuses(r"turning_point_gains: .* expected \[B, S", turning_point_gains, torch.ones(shape))


@given(seed=st.integers(0, 10_000), depth=st.integers(1, 3), trees=st.integers(1, 3))
def test_edges_are_compared_with_those_of_their_step(seed: int, depth: int, trees: int) -> None:
    """By the mean of the leaves below them; the advantages of a step have mean 0 over the edges, each counted once."""
    leaves = 2**depth
    reward, leaf = normals(seed, trees * leaves), torch.arange(trees * leaves)
    edge = torch.stack([leaf // (leaves >> level) for level in range(depth + 1)], dim=1)  # one edge, 2, 4, ...
    got = edge_advantages(reward, edge, leaf // leaves)
    assert torch.equal(got.first.sum(0), trees * 2 ** torch.arange(depth + 1))
    assert not got.advantage[:, 0].any()  # a step with one edge
    assert_close(got.advantage[:, -1], group_advantages(reward, leaf // leaves, eps=1e-8))  # every leaf: GRPO
    for level in range(1, depth + 1):
        means = reward.reshape(trees, 2**level, -1).mean(2)  # the weights of an edge's leaves add up to 1
        once = got.advantage[got.first[:, level], level].reshape(trees, -1)
        assert_close(once.mean(1), torch.zeros(trees).double(), atol=1e-7, rtol=0)
        expected = group_advantages(means.flatten(), torch.arange(trees).repeat_interleave(2**level), eps=1e-8)
        assert_close(once.flatten(), expected)
    shuffled = torch.randperm(len(leaf), generator=torch.Generator().manual_seed(seed))
    again = edge_advantages(reward[shuffled], edge[shuffled], (leaf // leaves)[shuffled])
    assert_close(again.advantage, got.advantage[shuffled])
    assert not edge_advantages(1e-9 * reward, edge, leaf // leaves).advantage.any()
    refuses(r"edge_advantages: edge has shape", edge_advantages, reward, edge[:, 0], leaf // leaves)
