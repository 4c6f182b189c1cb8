"""GARDO: advantages that favour diverse good samples, and a KL only for samples with a doubtful reward."""

from typing import Literal

import torch
from torch import Tensor

from fluvial.core.advantages import group_advantages
from fluvial.core.checks import can_look, check_choice, check_number, compute_dtype
from fluvial.core.types import Ids, PerSample

Doubted = Literal["overrated", "underrated"]
DOUBTED: tuple[Doubted, ...] = ("overrated", "underrated")


def diverse_advantages(reward: PerSample, features: Tensor, group: Ids) -> PerSample:
    """Return advantages that are larger for good samples that differ from the rest of their group, `[B]`.

        A_i = (r_i - mean_g) d_i / mean_g(d)  where r_i >= mean_g, else r_i - mean_g
        d_i = min over j != i in the group of 1 - cos(f_i, f_j)

    d_i / mean_g(d) is 1 if all features of a group are equal, and for a group of one.

    Args:
        reward: `[B]`.
        features: features f of each sample, `[B, D]`.
        group: group of each sample, `[B]` integers.

    Source: GARDO, arXiv 2512.24138, and its code, without division by a standard deviation.
    """
    centred = group_advantages(reward, group, scale="none")
    if features.ndim != 2 or len(features) != len(reward):
        raise ValueError(f"diverse_advantages: features have shape {list(features.shape)}, expected [{len(reward)}, D]")
    unit = torch.nn.functional.normalize(features.to(torch.float64), dim=1)
    same = group[:, None] == group
    others = same & ~torch.eye(len(reward), dtype=torch.bool, device=reward.device)
    nearest = torch.nn.functional.pad(torch.where(others, 1 - unit @ unit.T, torch.inf), (0, 1), value=torch.inf).amin(1)
    distance = torch.where(others.any(1), nearest.clamp(min=0), torch.zeros_like(nearest))
    mean = (same.to(distance.dtype) @ distance) / same.sum(1)
    equal = mean < 1e-12  # rounding of a cosine of 1
    factor = torch.where(equal, torch.ones_like(distance), distance / torch.where(equal, torch.ones_like(mean), mean))
    return centred * torch.where(centred < 0, torch.ones_like(distance), factor).to(centred.dtype)


def rank_doubt(reward: PerSample, others: Tensor, *, doubted: Doubted = "overrated") -> PerSample:
    """Return the disagreement of a reward's ranks with the ranks of other rewards, `[B]` in (-1, 1).

        u_i = (mean over the other rewards k of rank_k(i) - rank(i)) / B        overrated; its negative: underrated

    The best sample has rank 1, ties share their mean rank, and u sums to 0. With "overrated", u is above 0 for samples that
    the reward ranks better than the others do.

    Args:
        reward: the reward that is trained on, `[B]`.
        others: the other rewards, `[B, K]`, K at least 1.
        doubted: samples for which u is above 0.

    Source: GARDO, arXiv 2512.24138. Its text doubts overrated samples; in its code u is above 0 for underrated ones.
    """
    check_choice("rank_doubt", "doubted", doubted, DOUBTED)
    dtype = compute_dtype("rank_doubt", reward=reward, others=others)
    if others.ndim != 2 or len(others) != len(reward) or not others.shape[1]:
        raise ValueError(f"rank_doubt: others have shape {list(others.shape)}, expected [{len(reward)}, K] with K above 0")
    columns = torch.cat([reward.to(dtype)[:, None], others.to(dtype)], dim=1)
    above, equal = (columns[None] > columns[:, None]), (columns[None] == columns[:, None])
    rank = above.sum(1).to(dtype) + (equal.sum(1).to(dtype) + 1) / 2
    doubt = (rank[:, 1:].mean(1) - rank[:, 0]) / len(reward)
    return doubt if doubted == "overrated" else -doubt


def doubt_gate(doubt: PerSample, *, share: float) -> PerSample:
    """Return 1 for the samples whose doubt is among the largest, else 0, `[B]`.

    These are the samples whose doubt is at least the (1 - share) quantile of the non-negative doubts.

    Args:
        doubt: `rank_doubt`, `[B]`.
        share: share of the samples with non-negative doubt, in (0, 1]; 1 selects all of them.

    Source: GARDO, arXiv 2512.24138; its code uses > in place of >=.
    """
    check_number("doubt_gate", "share", share, low=1e-12, high=1)
    dtype = compute_dtype("doubt_gate", doubt=doubt)
    if can_look(doubt) and not torch.isfinite(doubt).all():
        raise ValueError("doubt_gate: doubt is not finite")
    known = doubt >= 0
    known_doubts = torch.nn.functional.pad(torch.where(known, doubt.to(dtype), torch.inf), (0, 1), value=torch.inf)
    ordered, last = torch.sort(known_doubts).values, (known.sum() - 1).clamp(min=0)
    place = (1 - share) * last.to(dtype)  # torch.nanquantile has no rule for vmap
    below, above = (ordered.gather(0, bound(place).long()[None]) for bound in (torch.floor, torch.ceil))
    threshold = below + (place - place.floor()) * torch.where(below == above, torch.zeros_like(above), above - below)
    return (doubt.to(dtype) >= threshold).to(dtype)
