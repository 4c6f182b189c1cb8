"""Advantages: rewards centred in their group and scaled, without Python loops over samples or reads from the device."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import can_look, check_choice, check_group, check_number, compute_dtype
from fluvial.core.types import Ids, PerSample

Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")


def group_advantages(
    reward: PerSample, group: Ids, *, scale: Scale = "group", eps: float = 1e-4, ddof: int = 1
) -> PerSample:
    """Return the advantages of GRPO, `[B]`: rewards minus their group's mean, divided by the standard deviation of `scale`.

        group   A = (r - mean_g) / (std_g + eps)       GRPO, arXiv 2402.03300
        batch   A = (r - mean_g) / (std_batch + eps)   Flow-GRPO's global std, arXiv 2505.05470
        none    A = r - mean_g                         Dr. GRPO, arXiv 2503.20783

    A group of one has advantage 0.

    Args:
        reward: `[B]`.
        group: group of each sample, `[B]` integers of any value and in any order; the samples of a prompt share one.
        scale: standard deviation that centred rewards are divided by, see above.
        eps: added to the standard deviation, in the reward's unit, > 0.
        ddof: 1 for unbiased standard deviations, 0 for those of the population (numpy's default).

    Raises:
        ValueError: shapes differ, or a reward is not finite (checked where values are known, see `checks.can_look`).
    """
    check_choice("group_advantages", "scale", scale, SCALES)
    check_number("group_advantages", "eps", eps, low=1e-12)
    if ddof not in (0, 1):
        raise ValueError(f"group_advantages: ddof is {ddof!r}, expected 0 or 1")
    dtype = check_rewards("group_advantages", reward, group)
    if reward.ndim != 1:
        raise ValueError(f"group_advantages: reward has shape {list(reward.shape)}, expected [B]")
    reward = reward.to(torch.float64)
    centred, std = _group_moments(reward, group, ddof)
    if scale == "group":
        centred = centred / (std + eps)
    elif scale == "batch":
        centred = centred / (_std(reward, ddof) + eps)
    return centred.to(dtype)


def multi_reward_advantages(
    rewards: Tensor, weights: Tensor, group: Ids, *, scale: Scale = "group", eps: float = 1e-4, ddof: int = 1
) -> PerSample:
    """Return the advantages of several rewards, `[B]`: each is normalised in its group, their sum over the batch.

        A = S / (std(S) + eps),  S = sum_k w_k A_k,  A_k = group_advantages(r_k)

    Normalising each reward before the sum keeps a reward with a large spread from dominating (GDPO, arXiv 2601.05242). The
    mean of S is 0; it is not subtracted, because its rounding would give samples of flat groups an advantage.

    Args:
        rewards: `[B, K]`.
        weights: weight of each reward, `[K]`.
        group: group of each sample, `[B]` integers.
        scale, eps, ddof: as in `group_advantages`, errors included; eps and ddof also apply to the sum.
    """
    dtype = check_rewards("multi_reward_advantages", rewards, group)
    if rewards.ndim != 2 or weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"multi_reward_advantages: rewards {list(rewards.shape)} and weights {list(weights.shape)}, "
            "expected [B, K] and [K]"
        )
    columns = [
        group_advantages(reward.to(torch.float64), group, scale=scale, eps=eps, ddof=ddof) for reward in rewards.unbind(1)
    ]
    total = torch.stack(columns, dim=1) @ weights.to(torch.float64)
    return (total / (_std(total, ddof) + eps)).to(dtype)


class EdgeAdvantages(NamedTuple):
    """Advantages of the edges of trees with B leaves and S steps, `[B, S]`; the leaves below an edge share its value."""

    advantage: Tensor
    first: Tensor  # bool, whether the leaf is the first in the batch below its edge


def edge_advantages(
    reward: PerSample, edge: Tensor, tree: Ids, *, eps: float = 1e-8, least: float = 1e-6, ddof: int = 1
) -> EdgeAdvantages:
    """Return the advantage of each edge relative to the edges of the same step in its tree, `[B, S]`.

        R_e = mean of the rewards of the leaves below e
        A_e = (R_e - mean R) / (std R + eps) over the tree's edges of the step, 0 if std R < least

    Args:
        reward: reward of each leaf, `[B]`.
        edge: edge that each leaf takes at each step, integers `[B, S]`; leaves with the same number share it.
        tree: tree of each leaf, `[B]` integers.
        eps, least: constants of the equation, in the unit of the reward.
        ddof: 1 for unbiased standard deviations, 0 for those of the population.

    Raises:
        ValueError: shapes differ, or a reward is not finite.

    Source: BranchGRPO, arXiv 2509.06040, and its code.
    """
    dtype = check_rewards("edge_advantages", reward, tree)
    if edge.ndim != 2 or len(edge) != len(reward) or reward.ndim != 1:
        raise ValueError(f"edge_advantages: edge has shape {list(edge.shape)}, expected [{len(reward)}, S]")
    index = torch.arange(len(reward), device=reward.device)
    is_later = index[:, None] - index > 0  # whether a leaf comes after another
    advantages, firsts = [], []
    for edges in edge.unbind(1):
        same = ((edges[:, None] == edges) & (tree[:, None] == tree)).to(torch.float64)
        mean = same @ reward.to(torch.float64) / same.sum(1)
        first = ~((same > 0) & is_later).any(1)
        siblings = (tree[:, None] == tree).to(torch.float64) * first.to(torch.float64)  # edges of the tree, once each
        count = siblings.sum(1)
        centred = mean - siblings @ mean / count
        variance = siblings @ centred**2 / (count - ddof).clamp(min=1)
        equal = variance < least**2
        std = torch.sqrt(torch.where(equal, 1.0, variance))  # the gradient of a root at 0 is infinite
        advantages.append(torch.where(equal, 0.0, centred / (std + eps)))
        firsts.append(first)
    return EdgeAdvantages(torch.stack(advantages, dim=1).to(dtype), torch.stack(firsts, dim=1))


class TurningPoints(NamedTuple):
    """Rewards of the steps of B samples, `[B, S]`."""

    gain: Tensor
    turning: Tensor  # bool, whether the gain is that of all remaining steps


def turning_point_gains(rewards: Tensor, *, balanced: bool = True) -> TurningPoints:
    """Return the reward gain of each step; at turning points that of all remaining steps, `[B, S]`.

        r_k = R_{k+1} - R_k, D = R_S - R_0
        turning point    sign(r_k) = sign(D) = sign(R_S - R_{k+1}), and for k > 0 sign(r_{k-1}) = -sign(D)
        gain             R_S - R_k at turning points, else r_k

    R_k is the reward after completing the sample before step k with deterministic steps. At a turning point the reward
    starts to change in its final direction. If balanced, equally many turning points count per sign of D, those with the
    largest |D|; the others keep r_k. If all have one sign, all of them count, as in the published code.

    Args:
        rewards: R_0 to R_S, `[B, S+1]`.
        balanced: use equally many turning points per sign of D, if both signs occur.

    Raises:
        ValueError: rewards are not finite, or not `[B, S+1]`.

    Source: TP-GRPO, arXiv 2602.06422, and its code.
    """
    dtype = compute_dtype("turning_point_gains", rewards=rewards)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"turning_point_gains: rewards has shape {list(rewards.shape)}, expected [B, S+1] with S > 0")
    check_rewards("turning_point_gains", rewards, torch.zeros_like(rewards[:, 0], dtype=torch.int64))
    rewards = rewards.to(torch.float64)
    gain, total, remaining = rewards.diff(dim=1), rewards[:, -1:] - rewards[:, :1], rewards[:, -1:] - rewards[:, 1:]
    direction = torch.sign(total)
    is_final_direction = (torch.sign(gain) * torch.sign(remaining) > 0) & (torch.sign(gain) * direction > 0)
    turned = torch.cat([torch.ones_like(direction), -torch.sign(gain[:, :-1]) * direction], dim=1) > 0
    turning = is_final_direction & turned
    if balanced:
        signs = [turning & (direction * sign > 0) for sign in (1, -1)]
        counts = torch.stack([candidates.sum() for candidates in signs])
        least = torch.where(counts.amin() > 0, counts.amin(), counts.amax())
        turning = torch.zeros_like(turning)
        for candidates in signs:
            size = torch.where(candidates, total.abs(), -1.0).flatten()
            rank = torch.argsort(torch.argsort(size, descending=True, stable=True), stable=True).view_as(candidates)
            turning = turning | (candidates & (rank < least))
    return TurningPoints(torch.where(turning, rewards[:, -1:] - rewards[:, :-1], gain).to(dtype), turning)


def check_rewards(function: str, reward: Tensor, group: Tensor) -> torch.dtype:
    """Return the dtype of the computation; raise unless the rewards are finite and each has a group."""
    dtype = compute_dtype(function, reward=reward)
    if reward.ndim == 0:
        raise ValueError(f"{function}: reward has shape [], expected [B]")
    check_group(function, group, reward.shape[0])
    if can_look(reward) and not torch.isfinite(reward).all():
        where = torch.nonzero(~torch.isfinite(reward)).tolist()
        raise ValueError(f"{function}: rewards are not finite at indices {[i[0] if len(i) == 1 else i for i in where]}")
    return dtype


def _group_moments(reward: Tensor, group: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return each sample's reward minus its group's mean, and its group's standard deviation, both `[B]`."""
    # A group's id is its first index in sorted order: below B, and computed without counting the groups on the host.
    ids = torch.searchsorted(torch.sort(group).values, group.contiguous())
    zeros = torch.zeros_like(reward)
    count = zeros.index_add(0, ids, torch.ones_like(reward))[ids]
    centred = reward - zeros.index_add(0, ids, reward)[ids] / count
    variance = zeros.index_add(0, ids, centred**2)[ids] / (count - ddof).clamp(min=1)
    return centred, torch.sqrt(variance)


def _std(reward: Tensor, ddof: int) -> Tensor:
    return torch.sqrt(((reward - reward.mean()) ** 2).sum() / max(len(reward) - ddof, 1))
