"""The hot path of one step: compositions of `core.gaussian`, `core.policy` and `core.guidance` that the kernels fuse.

Each function is the reference of the operation of the same name in `fluvial.kernels`. Arguments come in the order
(transition, x, v, x_next); everything else is passed by keyword.
"""

from typing import Literal

from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import check_choice, check_number, check_per_sample, compute_dtype, number
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.guidance import classifier_free
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.core.random import Key, normal, sample_keys
from fluvial.core.transitions import Transition
from fluvial.core.types import Level, PerSample, Samples, Scalar

KLWeight = Literal["rate", "exact", "mse"]
KL_WEIGHTS: tuple[KLWeight, ...] = ("rate", "exact", "mse")


def step_log_prob(
    transition: Transition,
    x: Samples,
    v: Samples,
    x_next: Samples,
    *,
    v_ref: Samples | None = None,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
) -> tuple[PerSample, PerSample | None]:
    """Return the step's log-probability and its KL to the reference policy's step (None without v_ref), in nats, `[B]`.

    The equations are those of `gaussian.log_prob` and `gaussian.kl`.

    Args:
        transition: coefficients `[B]`, 0-d or `[B, R]`.
        x, v, x_next: sample, model output and next sample, `[B, *event]`.
        v_ref: output of the reference policy, with its own guidance applied, `[B, *event]`.
        v_uncond: unconditional model output, `[B, *event]`; v is then replaced by v_uncond + guidance (v - v_uncond).
        guidance: guidance scale, `[B]`, 0-d or float; required with v_uncond, else None.
        form, reduction: as in `gaussian.log_prob`.

    Raises:
        ValueError: only one of v_uncond and guidance is set, or as in `gaussian.log_prob`.
    """
    v = apply_guidance("step_log_prob", v, v_uncond, guidance)
    log_prob = gaussian.log_prob(transition, x, v, x_next, form=form, reduction=reduction)
    return log_prob, None if v_ref is None else gaussian.kl(transition, v, v_ref, reduction=reduction)


def sde_step(
    transition: Transition,
    x: Samples,
    v: Samples,
    *,
    key: Key,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
) -> tuple[Samples, PerSample]:
    """Return a draw x_next ~ N(a x + b v, std^2 I), `[B, *event]`, and its log-probability, `[B]`, as `gaussian.draw` does.

    Args:
        transition: coefficients `[B]`, 0-d or `[B, R]`.
        x, v: sample and model output, `[B, *event]`.
        key: key of the noise: one key per sample, or one key, into which each sample's index in the batch is folded.
        v_uncond, guidance, form, reduction: as in `step_log_prob`, errors included.
    """
    v = apply_guidance("sde_step", v, v_uncond, guidance)
    keys = sample_keys(key, x.shape[0], device=x.device)
    return gaussian.draw(transition, x, v, normal(keys, tuple(x.shape)), form=form, reduction=reduction)


def policy_loss(
    transition: Transition,
    x: Samples,
    v: Samples,
    x_next: Samples,
    *,
    log_prob_old: PerSample,
    advantage: PerSample,
    clip_low: Scalar,
    clip_high: Scalar,
    v_ref: Samples | None = None,
    kl_coef: Scalar = 0.0,
    kl_weight: KLWeight = "rate",
    dt: Level | None = None,
    v_uncond: Samples | None = None,
    guidance: Scalar | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
) -> tuple[PerSample, PolicyInfo]:
    """Return the clipped surrogate of stored pairs plus the KL to the reference policy's step, `[B]`, and diagnostics.

        loss = clipped_surrogate(log_prob, log_prob_old, advantage) + kl_coef w KL,
        w = |dt| (rate), 1 (exact) or 2 std^2 (mse)

    Args:
        transition, x, v, x_next, v_ref, v_uncond, guidance, form, reduction: as in `step_log_prob`.
        log_prob_old, advantage: log-prob under the old policy and advantage of each pair, `[B]`.
        clip_low, clip_high: as in `policy.clipped_surrogate`.
        kl_coef: weight of the KL, >= 0.
        kl_weight: "exact" adds the KL itself. "rate" adds |dt| times the KL, which is what Flow-GRPO (arXiv 2505.05470)
            publishes, because its std is a rate; it is the published form for flow_sde. The published form for cps,
            dance_sde and ddim is "exact". "mse" adds the squared distance of the two means, which is 2 std^2 times the KL
            (Flow-CPS's code for SD3).
        dt: sigma_next - sigma of each pair, `[B]`, 0-d or float, or per block, `[B, R]`; needed for "rate".

    Raises:
        ValueError: kl_coef is set without v_ref, "rate" is used without dt, or as in `step_log_prob`.
    """
    v = apply_guidance("policy_loss", v, v_uncond, guidance)
    log_prob, kl = step_log_prob(transition, x, v, x_next, v_ref=v_ref, form=form, reduction=reduction)
    scale = kl_scale(transition, v, v_ref=v_ref, kl_coef=kl_coef, kl_weight=kl_weight, dt=dt)
    loss, info = clipped_surrogate(log_prob, log_prob_old, advantage, clip_low=clip_low, clip_high=clip_high)
    if kl is None or v_ref is None:
        return loss, info
    return add_kl(loss, info, kl, weigh_kl(kl, kl_coef, scale, transition, v, v_ref, reduction))


def add_kl(loss: PerSample, info: PolicyInfo, kl: PerSample, weighed: PerSample) -> tuple[PerSample, PolicyInfo]:
    """Add a KL term, weighted by `weigh_kl`, to a surrogate loss and its diagnostics."""
    return loss + weighed, PolicyInfo(*info[:-1], kl_ref=kl.detach())  # torch 2.11 compiles no _replace


def kl_scale(
    transition: Transition, v: Tensor, *, v_ref: Tensor | None, kl_coef: Scalar, kl_weight: KLWeight, dt: Level | None
) -> Tensor | float:
    """Return `kl_factor` after checking the options of the KL term; 1 without a KL term."""
    check_number("policy_loss", "kl_coef", kl_coef, low=0, batch=v.shape[0])
    check_choice("policy_loss", "kl_weight", kl_weight, KL_WEIGHTS)
    used = isinstance(kl_coef, Tensor) or kl_coef > 0
    if used and v_ref is None:
        raise ValueError(f"policy_loss: kl_coef is {kl_coef} and v_ref is None: a KL needs the reference policy's velocity")
    if not used:
        return 1.0
    if isinstance(dt, Tensor) and kl_weight == "rate":
        check_per_sample("policy_loss", v.shape, dt=dt, **({"std": transition.std} if dt.ndim == 2 else {}))
    return kl_factor(transition, dt, kl_weight)


def kl_factor(transition: Transition, dt: Level | None, kl_weight: KLWeight) -> Tensor | float:
    """Return the factor of a step's exact KL in the loss: |dt| (rate), 1 (exact) or 2 std^2 (mse), `[B]` or `[B, R]`.

    Raises:
        ValueError: "rate" is used without dt.
    """
    if kl_weight == "exact":
        return 1.0
    if kl_weight == "mse":
        return 2 * transition.std.to(compute_dtype("policy_loss", std=transition.std)) ** 2
    if dt is None:
        raise ValueError("policy_loss: kl_weight is 'rate' and dt is None: pass dt = sigma_next - sigma, or 'exact'")
    return dt.abs() if isinstance(dt, Tensor) else abs(dt)


def weigh_kl(
    kl: PerSample,
    coef: Scalar,
    factor: Tensor | float,
    transition: Transition,
    v: Samples,
    v_ref: Samples,
    reduction: Reduction,
) -> PerSample:
    """Return coef times factor times the KL of each step, `[B]`; a factor `[B, R]` applies to each block.

    Args:
        kl: `gaussian.kl(transition, v, v_ref, reduction=reduction)`.
        coef: weight of the term in the loss, >= 0, `[B]`, 0-d or float.
        factor: value of `kl_factor`, `[B]`, `[B, R]`, 0-d or float.
    """
    kl = kl.to(compute_dtype("weigh_kl", kl=kl))
    coef = number("policy_loss", "kl_coef", coef, kl, low=0)
    if not isinstance(factor, Tensor) or factor.ndim < 2:
        return coef * factor * kl
    return coef * gaussian.kl(transition._replace(std=transition.std / factor.sqrt()), v, v_ref, reduction=reduction)


def check_guidance(function: str, v_uncond: Tensor | None, guidance: Scalar | None) -> None:
    """Raise ValueError unless v_uncond and guidance are both set or both None."""
    if (v_uncond is None) != (guidance is None):
        missing = "v_uncond" if v_uncond is None else "guidance"
        raise ValueError(f"{function}: {missing} is None, expected v_uncond and guidance together or neither")


def apply_guidance(function: str, v: Samples, v_uncond: Samples | None, guidance: Scalar | None) -> Samples:
    """Return the guided velocity, or v itself if v_uncond and guidance are None."""
    check_guidance(function, v_uncond, guidance)
    return v if v_uncond is None or guidance is None else classifier_free(v, v_uncond, guidance)
