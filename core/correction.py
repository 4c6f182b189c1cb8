"""Rollout correction: importance weights for rollouts whose program or model weights differ from the trainer's."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import can_look, check_choice, check_number, match_tensors
from fluvial.core.types import PerStep

Mode = Literal["truncate", "reject", "mask"]
MODES: tuple[Mode, ...] = ("truncate", "reject", "mask")
Level = Literal["step", "trajectory"]
LEVELS: tuple[Level, ...] = ("step", "trajectory")


class CorrectionInfo(NamedTuple):
    """Diagnostics of a rollout, 0-d each, of the steps' difference d in log-prob and of the weights."""

    gap_mean: Tensor  # mean |d|, 0 if both programs agree
    gap_p99: Tensor  # 99th percentile of |d|
    gap_max: Tensor  # largest |d|
    kl: Tensor  # mean rho - 1 - log rho >= 0 (k3), which estimates KL(rollout || old)
    chi2: Tensor  # mean rho^2 - 1, which estimates chi^2(old || rollout)
    effective: Tensor  # effective sample size divided by the number of weights, (sum w)^2 / (n sum w^2), in [0, 1]
    limited: Tensor  # share of weights that were truncated or rejected


def rollout_weights(
    log_prob_old: PerStep, log_prob_rollout: PerStep, *, mode: Mode, threshold: float, level: Level = "step"
) -> tuple[PerStep, CorrectionInfo]:
    """Return the weight of each recorded step, `[B, S]`, and diagnostics; multiply the update's loss by the weights.

        d = log_prob_old - log_prob_rollout (step), or its sum over a sample's steps (trajectory);  rho = exp(d)
        truncate   min(rho, threshold)
        reject     rho where 1/threshold <= rho <= threshold, else 0
        mask       1 where 1/threshold <= rho <= threshold, else 0

    A rollout with another engine, precision or version of the weights has other log-probs than the trainer computes for the
    same steps. The ratio rho corrects for this, and its bound keeps the variance finite. Weights carry no gradient. With
    reduction="sum", rho is a ratio of joint densities. With the usual "mean" it is the N-th root of that ratio for N
    elements, so only a threshold near 1 (for example 1.001) has an effect.

    If d is +inf, the weight is the threshold (truncate) or 0; if it is -inf, the weight is 0. The loss stays finite. The
    diagnostics are then infinite, never NaN. An empty batch has diagnostics of 0.

    Args:
        log_prob_old: log-probs under the policy before the update, computed by the trainer, `[B, S]`.
        log_prob_rollout: log-probs that the rollout recorded, `[B, S]`.
        mode: see above.
        threshold: largest ratio, in [1, 1e30].
        level: "step", or "trajectory": all steps of a sample share the weight of their sum.

    Raises:
        ValueError: d is NaN; the message lists the indices. Where values are not known (see `checks.can_look`), the weight
            and the loss are NaN rather than a silent 0.

    Source: truncated importance weights, IMPALA, arXiv 1802.01561; the modes and levels follow trainers of language models
    (verl).
    """
    check_choice("rollout_weights", "mode", mode, MODES)
    check_choice("rollout_weights", "level", level, LEVELS)
    check_number("rollout_weights", "threshold", threshold, low=1, high=1e30)
    old, rollout = match_tensors("rollout_weights", log_prob_old=log_prob_old, log_prob_rollout=log_prob_rollout)
    if log_prob_old.ndim != 2:
        raise ValueError(f"rollout_weights: log_prob_old has shape {list(log_prob_old.shape)}, expected [B, S]")
    gap = old.detach() - rollout.detach()
    difference = gap if level == "step" else gap.sum(1, keepdim=True).expand_as(gap)
    if can_look(difference) and difference.isnan().any():
        where = torch.nonzero(difference.isnan()).tolist()
        raise ValueError(f"rollout_weights: log_prob_old - log_prob_rollout is NaN ({level}) at indices {where}")
    weight, bound = torch.exp(difference), math.log(threshold)
    if mode == "truncate":
        limited = difference > bound
        weight = weight.clamp(max=threshold)
    else:
        limited = difference.abs() > bound
        weight = torch.where(limited, 0.0, weight if mode == "reject" else torch.ones_like(weight))
        weight = torch.where(difference.isnan(), torch.nan, weight)
    return weight, _compute_info(gap, weight, limited)


def _compute_info(gap: Tensor, weight: Tensor, limited: Tensor) -> CorrectionInfo:
    if gap.numel() == 0:
        return CorrectionInfo(*[gap.new_zeros(())] * len(CorrectionInfo._fields))
    size = gap.abs()
    # Dividing by the largest weight keeps squares from overflowing; if all weights are 0, the result is 0, not 0 / 0.
    scaled = weight / weight.max().clamp(min=torch.finfo(weight.dtype).tiny)
    effective = scaled.sum() ** 2 / (scaled.numel() * (scaled**2).sum().clamp(min=1))
    return CorrectionInfo(
        gap_mean=size.mean(),
        # An entry, because an interpolation with an infinite neighbour may be NaN.
        gap_p99=torch.sort(size.flatten()).values[math.ceil(0.99 * (size.numel() - 1))],
        gap_max=size.max(),
        kl=(torch.expm1(gap) - gap.clamp(max=80)).mean(),  # clamped, because it would be inf - inf at +inf
        chi2=torch.expm1(2 * gap).mean(),
        effective=effective,
        limited=limited.to(weight.dtype).mean(),
    )
