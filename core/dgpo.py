"""Direct group preference optimisation (DGPO): preference of the good over the bad samples of a group."""

from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import check_group, compute_dtype, match_tensors, number
from fluvial.core.types import Ids, PerSample, Scalar


class DgpoInfo(NamedTuple):
    """Diagnostics of DGPO, one number per item, without gradient."""

    error: Tensor  # matching error of the policy
    clipped: Tensor  # 1 where the clip sets the gradient to 0, else 0
    group_weight: Tensor  # w in (0, 1): near 0 once the policy prefers the good samples of the group
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


def group_weight(margin: Tensor, group: Ids, *, counts: Tensor | None = None) -> Tensor:
    """Return the weight of each sample's group, `[B, M]`; it falls as the policy prefers the good samples more.

        w_g = sigmoid(sum over the group of margin / G)

    G is the number of counted samples of the group.

    Args:
        margin: `preference_margin` of each sample at each of its M noise levels, `[B, M]`.
        group: group of each sample, `[B]`.
        counts: whether an item counts, bool `[B, M]`; by default all do.

    Source: DGPO, arXiv 2510.08425, and its published code.
    """
    margin = margin.to(compute_dtype("group_weight", margin=margin))
    if margin.ndim != 2:
        raise ValueError(f"group_weight: margin has shape {list(margin.shape)}, expected [B, M]")
    check_group("group_weight", group, len(margin))
    counted = torch.ones_like(margin) if counts is None else counts.to(margin.dtype)
    same = (group[:, None] == group).to(margin.dtype)
    return torch.sigmoid(same @ (margin * counted) / (same @ counted).clamp(min=1))


def preference_margin(error: PerSample, error_ref: PerSample, advantage: PerSample, *, beta: Scalar) -> PerSample:
    """Return each sample's term in the sigmoid of its group, beta A (error - error_ref), `[B]`.

    Args:
        error, error_ref: `flow_matching.velocity_error` of the policy and of the reference, `[B]`.
        advantage: advantage A, `[B]`.
        beta: inverse temperature of the preference, > 0.
    """
    error, error_ref, advantage = match_tensors("preference_margin", error=error, error_ref=error_ref, advantage=advantage)
    beta = number("preference_margin", "beta", beta, error, low=1e-12)
    return beta * advantage * (error - error_ref)


def dgpo_loss(
    error: PerSample, error_old: PerSample, advantage: PerSample, weight: PerSample, *, clip_low: Scalar, clip_high: Scalar
) -> tuple[PerSample, DgpoInfo]:
    """Return the loss of DGPO and its diagnostics, each `[B]`: a matching error weighted by advantage and group.

        loss = w_g A error, without gradient where rho > 1 + clip_high and A > 0, or rho < 1 - clip_low and A <= 0
        rho = exp(error_old - error)

    It takes no log-probability, so the samples may come from any solver.

    Args:
        error: `flow_matching.velocity_error` of the policy, `[B]`.
        error_old: `velocity_error` of the old policy, a fast moving average, `[B]`.
        advantage: advantage A, `[B]`.
        weight: `group_weight` at the item's noise level, `[B]`; it is detached.
        clip_low, clip_high: >= 0; the range of the ratio rho is [1 - clip_low, 1 + clip_high].

    Source: DGPO, arXiv 2510.08425, and its published code, which adds the clip.
    """
    error, error_old, advantage, weight = match_tensors(
        "dgpo_loss", error=error, error_old=error_old, advantage=advantage, weight=weight
    )
    clip_low = number("dgpo_loss", "clip_low", clip_low, error, low=0, high=1)
    clip_high = number("dgpo_loss", "clip_high", clip_high, error, low=0)
    weight = weight.detach()
    ratio = torch.exp((error_old - error).detach().clamp(max=80))
    is_clipped = torch.where(advantage > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    loss = weight * advantage * torch.where(is_clipped, error.detach(), error)
    return loss, DgpoInfo(error.detach(), is_clipped.to(loss.dtype), weight, torch.zeros_like(weight))
