"""Policy-gradient objectives over stored (sample, step) pairs: a loss a pair, and diagnostics; the caller reduces."""

from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import check_number, check_same_shape, compute_dtype
from fluvial.core.types import PerSample


class PolicyInfo(NamedTuple):
    """Diagnostics of a surrogate, one number a pair, without gradient."""

    ratio: Tensor
    log_ratio: Tensor
    clipped: Tensor  # 1 where the clip holds the gradient back, else 0
    kl_old: Tensor  # rho - 1 - log rho >= 0, whose mean estimates KL(old || current)


def clipped_surrogate(
    log_prob: PerSample, log_prob_old: PerSample, advantage: PerSample, *, clip_low: float, clip_high: float
) -> tuple[PerSample, PolicyInfo]:
    """Return the clipped surrogate loss of PPO and GRPO, and its diagnostics, each `[B]`.

        loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),  rho = exp(log_prob - log_prob_old)

    Args:
        log_prob, log_prob_old: of each pair under the current and the old policy, in nats (per dimension when the
            reduction is "mean"; the clip range is in the same unit).
        advantage: of each pair.
        clip_low, clip_high: >= 0; the ratio's range is [1 - clip_low, 1 + clip_high].

    Source: arXiv 1707.06347 (PPO), 2402.03300 (GRPO), 2505.05470 (Flow-GRPO); unequal ranges, 2503.14476 (DAPO).
    """
    check_number("clipped_surrogate", "clip_low", clip_low, low=0, high=1)
    check_number("clipped_surrogate", "clip_high", clip_high, low=0)
    check_same_shape("clipped_surrogate", log_prob=log_prob, log_prob_old=log_prob_old, advantage=advantage)
    dtype = compute_dtype("clipped_surrogate", log_prob=log_prob, log_prob_old=log_prob_old, advantage=advantage)
    advantage = advantage.to(dtype)
    log_ratio = log_prob.to(dtype) - log_prob_old.to(dtype)
    # An infinite ratio times the clip's zero gradient would be NaN; e^80 is far outside of any clip.
    ratio = torch.exp(log_ratio.clamp(max=80))
    free, held = -advantage * ratio, -advantage * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return torch.maximum(free, held), _info(ratio, log_ratio, clipped=held > free)


def _info(ratio: Tensor, log_ratio: Tensor, *, clipped: Tensor) -> PolicyInfo:
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    return PolicyInfo(ratio, log_ratio, clipped.to(ratio.dtype), torch.expm1(log_ratio) - log_ratio)
