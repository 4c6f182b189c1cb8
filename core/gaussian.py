"""The Gaussian of every sampler, x_next ~ N(a x + b v, std^2 I): its mean, a draw, its log-density, its KL.

Samples are `[B, *event]`; coefficients are `[B]`, 0-d, or `[B, R]` for samples `[B, R, ...]` with a noise level per block.
Then each block is a step of its own, and a sample's log-probability and KL are reduced over its blocks. Functions compute
in float32, or in float64 if an argument is float64. Any other dtype or shape raises a one-line TypeError or ValueError.
"""

import math
from typing import Literal

import torch
from einops import reduce
from torch import Tensor

from fluvial.core.checks import can_look, check_choice, check_per_sample, check_same_shape, compute_dtype, per_sample
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples

Form = Literal["density", "no_const", "unscaled"]
Reduction = Literal["mean", "sum"]
FORMS: tuple[Form, ...] = ("density", "no_const", "unscaled")
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
NO_DENSITY_HINT = "use eta > 0 and a stochastic step, or form='unscaled'"


def mean(transition: Transition, x: Samples, v: Samples) -> Samples:
    """Return the mean of the step, a x + b v, `[B, *event]`."""
    transition, x, v = _prepare("mean", transition, x=x, v=v)
    return _mean(transition, x, v)


def sample(transition: Transition, x: Samples, v: Samples, noise: Samples | None) -> Samples:
    """Return the next sample for given standard-normal noise, a x + b v + std noise, `[B, *event]`; None means no noise."""
    if noise is None:
        return mean(transition, x, v)
    transition, x, v, noise = _prepare("sample", transition, x=x, v=v, noise=noise)
    return _mean(transition, x, v) + per_sample(transition.std, x) * noise


def log_prob(
    transition: Transition, x: Samples, v: Samples, x_next: Samples, *, form: Form = "density", reduction: Reduction = "mean"
) -> PerSample:
    """Return the log-probability of the step from x to x_next, `[B]`: in nats per dimension, or nats (`sum`).

        density    -(x_next - a x - b v)^2 / (2 std^2) - log std - log(2 pi) / 2
        no_const   -(x_next - a x - b v)^2 / (2 std^2)
        unscaled   -(x_next - a x - b v)^2             (published with Flow-CPS; not a density)

    sglang's "no_const" is `form="unscaled"`. In this package, `form="no_const"` is the density without its constants.

    The gradient in v is (x_next - a x - b v) b / std^2, or 2 (x_next - a x - b v) b if unscaled. "mean" divides it by N.

    Args:
        transition: coefficients `[B]`, 0-d or `[B, R]`.
        x, v, x_next: sample, model output and next sample, `[B, *event]`.
        form: one of the equations above.
        reduction: "mean" over the event's N elements (nats per dimension, the usual one) or "sum" (the joint density).

    Raises:
        ValueError: std is 0 and the form divides by it. Where values are not known (see `checks.can_look`), the result is
            NaN.
    """
    check_choice("log_prob", "form", form, FORMS)
    check_choice("log_prob", "reduction", reduction, REDUCTIONS)
    transition, x, v, x_next = _prepare("log_prob", transition, x=x, v=v, x_next=x_next)
    return _log_prob("log_prob", transition, x_next - _mean(transition, x, v), form=form, reduction=reduction)


def draw(
    transition: Transition, x: Samples, v: Samples, noise: Samples, *, form: Form = "density", reduction: Reduction = "mean"
) -> tuple[Samples, PerSample]:
    """Return `sample` and its `log_prob` from one evaluation of the mean, bit-identical to the separate calls.

    Gradients flow through the sample (reparameterised), and through the log-probability with the sample held constant.

    Args:
        transition, x, v, noise: as in `sample`.
        form, reduction: as in `log_prob`.

    Raises:
        ValueError: as in `log_prob`.
    """
    check_choice("draw", "form", form, FORMS)
    check_choice("draw", "reduction", reduction, REDUCTIONS)
    transition, x, v, noise = _prepare("draw", transition, x=x, v=v, noise=noise)
    center = _mean(transition, x, v)
    x_next = center + per_sample(transition.std, x) * noise
    return x_next, _log_prob("draw", transition, x_next.detach() - center, form=form, reduction=reduction)


def _log_prob(function: str, transition: Transition, residual: Tensor, *, form: Form, reduction: Reduction) -> Tensor:
    """Return the log-probability of a residual x_next - mean, in nats, `[B]`."""
    squared_residual = _reduce_event(residual**2, transition.std, reduction)
    if form == "unscaled":
        return _reduce_blocks(-squared_residual, reduction)
    std = _nan_unless_positive(function, transition.std, way_out=NO_DENSITY_HINT)
    scaled = -squared_residual / (2 * std**2)
    if form == "no_const":
        return _reduce_blocks(scaled, reduction)
    constant = torch.log(std) + math.log(2 * math.pi) / 2
    size = math.prod(residual.shape[max(std.ndim, 1) :])
    return _reduce_blocks(scaled - (constant if reduction == "mean" else size * constant), reduction)


def kl(transition: Transition, v: Samples, v_ref: Samples, *, reduction: Reduction = "mean") -> PerSample:
    """Return KL(N(a x + b v, std^2) || N(a x + b v_ref, std^2)) = b^2 |v - v_ref|^2 / (2 std^2), `[B]`.

    In nats per dimension with "mean", in nats with "sum". Both means share the term a x, so only the velocities are needed.
    Flow-GRPO's published KL has a rate in place of the step's std, and equals this KL times |dt|.

    Args:
        transition: coefficients `[B]`, 0-d or `[B, R]`.
        v, v_ref: model outputs of the two policies, `[B, *event]`.
        reduction: "mean" over the event's elements or "sum".

    Raises:
        ValueError: std is 0 and its value is known; otherwise the result is NaN.
    """
    check_choice("kl", "reduction", reduction, REDUCTIONS)
    transition, v, v_ref = _prepare("kl", transition, v=v, v_ref=v_ref)
    std = _nan_unless_positive("kl", transition.std, way_out="use eta > 0 and a stochastic step")
    return _reduce_blocks(transition.b**2 * _reduce_event((v - v_ref) ** 2, std, reduction) / (2 * std**2), reduction)


def _reduce_event(values: Tensor, coefficient: Tensor, reduction: Reduction) -> Tensor:
    """Reduce over each sample, `[B]`, or over each block, `[B, R]`, if the coefficients are per block."""
    return reduce(values, "b r ... -> b r" if coefficient.ndim == 2 else "b ... -> b", reduction)


def _reduce_blocks(values: Tensor, reduction: Reduction) -> Tensor:
    """Reduce equally sized blocks to `[B]`; values that are already per sample are returned unchanged."""
    return values if values.ndim < 2 else reduce(values, "b r -> b", reduction)


def _mean(transition: Transition, x: Tensor, v: Tensor) -> Tensor:
    return per_sample(transition.a, x) * x + per_sample(transition.b, x) * v


def _prepare(function: str, transition: Transition, **samples: Tensor) -> tuple:
    """Check the arguments and cast them to the dtype of the computation: (transition, *samples)."""
    coefficients = transition._asdict()
    dtype = compute_dtype(function, **samples, **coefficients)
    check_same_shape(function, **samples)
    check_per_sample(function, next(iter(samples.values())).shape, **coefficients)
    cast = Transition(*(coefficient.to(dtype) for coefficient in transition))
    if any(coefficient.ndim == 2 for coefficient in cast):  # mixed coefficients per sample and per block
        cast = Transition(*torch.broadcast_tensors(*cast))
    return cast, *(tensor.to(dtype) for tensor in samples.values())


def check_stochastic(function: str, std: Tensor, *, way_out: str = NO_DENSITY_HINT) -> None:
    """Raise ValueError if a known std is not positive (see `checks.can_look`)."""
    if can_look(std) and not (std > 0).all():
        where = "every sample" if std.ndim == 0 else f"samples {torch.nonzero(~(std > 0)).flatten().tolist()}"
        raise ValueError(f"{function}: std is not positive for {where}: a deterministic step has no density; {way_out}")


def _nan_unless_positive(function: str, std: Tensor, *, way_out: str) -> Tensor:
    """Return std with NaN where it is not positive; a known std raises instead."""
    check_stochastic(function, std, way_out=way_out)
    return torch.where(std > 0, std, torch.nan)
