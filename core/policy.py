"""Policy-gradient objectives over stored (sample, step) pairs: one loss per pair and diagnostics; the caller reduces."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fluvial.core import checks, gaussian
from fluvial.core.checks import (
    check_number,
    check_per_sample,
    check_same_shape,
    compute_dtype,
    first_block,
    match_tensors,
    number,
)
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, PerStep, Samples, Scalar


class PolicyInfo(NamedTuple):
    """Diagnostics of a surrogate, one number per pair, without gradient."""

    ratio: Tensor  # rho, as used in the loss
    log_ratio: Tensor  # log_prob - log_prob_old; GRPO-Guard's correction is in rho only, not in kl_old
    clipped: Tensor  # 1 where the clip (or the KL threshold) sets the gradient to 0, else 0
    kl_old: Tensor  # rho - 1 - log rho >= 0, the k3 estimate of KL(old || current)
    kl_ref: Tensor  # KL to the reference policy's step if the loss has that term, else 0


def clipped_surrogate(
    log_prob: PerSample, log_prob_old: PerSample, advantage: PerSample, *, clip_low: Scalar, clip_high: Scalar
) -> tuple[PerSample, PolicyInfo]:
    """Return the clipped surrogate loss of PPO and GRPO, and its diagnostics, each `[B]`.

        loss = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),  rho = exp(log_prob - log_prob_old)

    Args:
        log_prob, log_prob_old: log-probs of each pair under the current and the old policy, `[B]`, in nats (per dimension
            if the reduction is "mean"; the clip range is in the same unit).
        advantage: advantage of each pair, `[B]`.
        clip_low, clip_high: >= 0; the ratio's range is [1 - clip_low, 1 + clip_high]. Each is a float,
            or a tensor `[B]` or 0-d, which gets a gradient and is cast to the dtype of the computation.

    Source: arXiv 1707.06347 (PPO), 2402.03300 (GRPO), 2505.05470 (Flow-GRPO); unequal ranges, 2503.14476 (DAPO).
    """
    log_prob, log_prob_old, advantage = match_tensors(
        "clipped_surrogate", log_prob=log_prob, log_prob_old=log_prob_old, advantage=advantage
    )
    clip_low = number("clipped_surrogate", "clip_low", clip_low, log_prob, low=0, high=1)
    clip_high = number("clipped_surrogate", "clip_high", clip_high, log_prob, low=0)
    log_ratio = log_prob - log_prob_old
    # An infinite ratio times the clip's zero gradient would be NaN; e^80 is far outside any clip range.
    ratio = torch.exp(log_ratio.clamp(max=80))
    unclipped, clipped = -advantage * ratio, -advantage * checks.clip(ratio, 1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), _info(ratio, log_ratio, clipped=clipped > unclipped)


def share_ratio(log_prob: PerStep, log_prob_old: PerStep, used: PerStep, *, size: int | None = None) -> PerStep:
    """Return old log-probs for `clipped_surrogate` with which each step gets the ratio of its whole chunk, `[B, S]`.

        log rho_c = mean over the used steps k of chunk c of log_prob_k - log_prob_old_k
        old_k = log_prob_k - log rho_c

    The mean of `clipped_surrogate` over a chunk's steps then has the value and gradient of the surrogate of rho_c, although
    each step computes only its own log-prob: rho_c is measured before the pass, and each step carries its share of it.

    Args:
        log_prob, log_prob_old: log-probs of the recorded steps under the current and the old policy, `[B, S]`.
        used: 1 for steps that are trained on, else 0, `[B, S]`. A chunk without any has the ratio 1.
        size: number of consecutive recorded steps per chunk, >= 1; the last chunk takes the remainder. None is one chunk.

    Source: ours. GSPO (arXiv 2507.18071) uses such a ratio over a sequence of tokens, Chunk-GRPO (2510.21583) over chunks of
    steps; the latter's equations were not consulted.
    """
    new, old, used = match_tensors("share_ratio", log_prob=log_prob, log_prob_old=log_prob_old, used=used)
    if new.ndim != 2:
        raise ValueError(f"share_ratio: log_prob has shape {list(new.shape)}, expected [B, S]")
    if size is not None:
        check_number("share_ratio", "size", size, low=1)
    size = max(new.shape[1], 1) if size is None else size
    sums, counts = (
        [part.sum(1, keepdim=True).expand_as(part) for part in table.split(size, dim=1)]
        for table in ((new - old) * used, used)
    )
    return new - torch.cat(sums, dim=1) / torch.cat(counts, dim=1).clamp(min=1)


def noise_weighted_surrogate(
    log_prob: PerSample,
    log_prob_old: PerSample,
    advantage: PerSample,
    std: Float[Tensor, " b"] | Float[Tensor, "b r"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
    scale: Scalar,
) -> tuple[PerSample, PolicyInfo]:
    """Return TempFlow-GRPO's surrogate loss, weighted by the noise of each step, and its diagnostics, each `[B]`.

        loss = scale std max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),  rho = exp(log_prob - log_prob_old)

    The gradient of a surrogate in v is |b| / std times a standard-normal draw. With the weight its scale is |b|, so early
    steps count for more: their noise is large, and they decide the composition.

    Args:
        log_prob, log_prob_old, advantage, clip_low, clip_high: as in `clipped_surrogate`.
        std: standard deviation of each pair's step, `[B]`, sqrt(|dt|) included; the first block's is used of `[B, R]`.
        scale: factor of all weights, > 0; the published value is 1.73.

    Source: TempFlow-GRPO, arXiv 2508.04324, and its published code.
    """
    loss, info = clipped_surrogate(log_prob, log_prob_old, advantage, clip_low=clip_low, clip_high=clip_high)
    scale = number("noise_weighted_surrogate", "scale", scale, loss, low=1e-12)
    compute_dtype("noise_weighted_surrogate", std=std)
    std = first_block(std)
    check_per_sample("noise_weighted_surrogate", loss.shape[0], std=std)
    return scale * std.to(loss.dtype) * loss, info


def step_scale(transition: Transition) -> Tensor:
    """Return the inverse size of a surrogate's gradient at each step, std / |b|, `[B]` or 0-d.

    The gradient of a plain surrogate in v is |b| / std times a standard-normal draw; times this scale it has the
    same size at every step. Divided by its mean over a batch, the scale is a weight.

    Args:
        transition: coefficients of each pair's step, b not 0; the first block's are used of `[B, R]`.

    Source: the weight of Flash-GRPO, arXiv 2605.15980, whose code tabulates it for one schedule.
    """
    dtype = compute_dtype("step_scale", b=transition.b, std=transition.std)
    return first_block(transition.std).to(dtype) / first_block(transition.b).to(dtype).abs()


def guard_surrogate(
    log_prob: PerSample,
    log_prob_old: PerSample,
    advantage: PerSample,
    transition: Transition,
    v: Samples,
    v_old: Samples,
    dt: Float[Tensor, " b"] | Float[Tensor, "b r"] | Float[Tensor, ""],
    *,
    clip: Scalar,
) -> tuple[PerSample, PolicyInfo]:
    """Return GRPO-Guard's surrogate loss, whose gradient has the same size at every step, and its diagnostics, each `[B]`.

        rho = exp((log_prob - log_prob_old + mean |b (v - v_old)|^2 / (2 std^2)) std)
        loss = max(-A rho, -A clip(rho, 1 - clip, 1 + clip)) / |dt|

    The gradient of the plain surrogate in v is |b| / std times a standard-normal draw. With Flow-SDE that is proportional
    to sqrt(|dt|) / r, twenty times larger at the last steps of a schedule than at the first. With this loss it is
    |b| / |dt|, which is constant for Flow-SDE. The added mean centres the log-ratio, whose expectation under the old policy
    is minus that mean. Gradients flow through it, too.

    Args:
        log_prob, log_prob_old, advantage: as in `clipped_surrogate`, in nats per dimension, of form "density" or "no_const".
        transition: coefficients of each pair's step, `[B]`, 0-d or `[B, R]`, std > 0. With `[B, R]`, the first block's std
            and dt scale the ratio.
        v, v_old: velocities under the two policies, `[B, *event]`.
        dt: sigma_next - sigma of each pair's step, `[B]`, `[B, R]` or 0-d.
        clip: >= 0; the ratio's range is [1 - clip, 1 + clip].

    Source: GRPO-Guard, arXiv 2510.22319.
    """
    probs = {"log_prob": log_prob, "log_prob_old": log_prob_old, "advantage": advantage}
    dtype, dt = compute_dtype("guard_surrogate", **probs, dt=dt, v=v), first_block(dt)
    check_same_shape("guard_surrogate", **probs)
    # KL(old || current) is the mean |b (v - v_old)|^2 / (2 std^2); kl also checks v, v_old and the coefficients.
    shift = gaussian.kl(transition, v, v_old).to(dtype)
    check_per_sample("guard_surrogate", shift.shape[0], log_prob=log_prob, dt=dt)
    clip = number("guard_surrogate", "clip", clip, shift, low=0, high=1)
    advantage, std = advantage.to(dtype), first_block(transition.std).to(dtype)
    log_ratio = log_prob.to(dtype) - log_prob_old.to(dtype)
    ratio = torch.exp(((log_ratio + shift) * std).clamp(max=80))
    unclipped, clipped = -advantage * ratio, -advantage * checks.clip(ratio, 1 - clip, 1 + clip)
    return torch.maximum(unclipped, clipped) / dt.abs(), _info(ratio, log_ratio, clipped=clipped > unclipped)


def dppo_surrogate(
    log_prob: PerSample,
    log_prob_old: PerSample,
    advantage: PerSample,
    transition: Transition,
    v: Samples,
    v_old: Samples,
    *,
    kl_threshold: Scalar,
) -> tuple[PerSample, PolicyInfo]:
    """Return Flow-DPPO's surrogate loss, bounded by the step's exact KL instead of a clip, and its diagnostics, each `[B]`.

        loss = 0 where KL >= kl_threshold and (A > 0 and rho > 1, or A < 0 and rho < 1), else -A rho
        rho = exp(log_prob - log_prob_old),  KL = mean b^2 |v - v_old|^2 / (2 std^2)

    A ratio is a noisy estimate of the distance between two policies, whereas the KL of two Gaussians with the same std is
    known exactly. A pair beyond the threshold is still trained on if its ratio has moved against its advantage, because its
    gradient moves the policy back. No gradient flows through the KL, and advantages are not clamped. `PolicyInfo.clipped`
    marks the pairs whose loss is 0.

    Args:
        log_prob, log_prob_old, advantage, transition, v, v_old: as in `guard_surrogate`.
        kl_threshold: largest KL, >= 0, in nats per dimension; the published value is 1e-5.

    Raises:
        ValueError: std is 0 and its value is known; otherwise loss and gradient are NaN.

    Source: Flow-DPPO, arXiv 2606.11025; for language models, 2602.04879.
    """
    probs = {"log_prob": log_prob, "log_prob_old": log_prob_old, "advantage": advantage}
    dtype = compute_dtype("dppo_surrogate", **probs, v=v, v_old=v_old)
    check_same_shape("dppo_surrogate", **probs)
    check_same_shape("dppo_surrogate", v=v, v_old=v_old)
    check_per_sample("dppo_surrogate", v.shape[0], log_prob=log_prob)
    kl = gaussian.kl(transition, v.detach(), v_old.detach())
    kl_threshold = number("dppo_surrogate", "kl_threshold", kl_threshold, kl, low=0)
    advantage = advantage.to(dtype)
    log_ratio = log_prob.to(dtype) - log_prob_old.to(dtype)
    ratio = torch.exp(log_ratio.clamp(max=80))
    moved = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
    blocked = moved & (kl >= kl_threshold)
    # A comparison with NaN is false: without this line a step without a density would count as within the threshold.
    nan_mask = torch.where(kl.isnan(), torch.nan, 1.0)
    return torch.where(blocked, 0.0, -advantage * ratio * nan_mask), _info(ratio, log_ratio, clipped=blocked)


def _info(ratio: Tensor, log_ratio: Tensor, *, clipped: Tensor) -> PolicyInfo:
    ratio, log_ratio = ratio.detach(), log_ratio.detach()
    return PolicyInfo(ratio, log_ratio, clipped.to(ratio.dtype), torch.expm1(log_ratio) - log_ratio, torch.zeros_like(ratio))
