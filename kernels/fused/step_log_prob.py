"""The log-probability of a step and its KL to a reference model's step, fused: `core.step.step_log_prob`."""

from typing import Any

import torch
from torch import Tensor

from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples
from fluvial.kernels.fused.gaussian_step import Saved, Step, forward, input_gradients, save
from fluvial.kernels.fused.rows import scalars
from fluvial.kernels.fused.transforms import differentiable


@torch.library.custom_op("fluvial::step_log_prob", mutates_args=())
def operation(
    v: Tensor, x_next: Tensor, x: Tensor, v_ref: Tensor | None, v_uncond: Tensor | None,
    a: Tensor, b: Tensor, std: Tensor, guidance: Tensor | None, form: str, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-prob and KL (`[0]` without v_ref), float32 `[B]`; samples are `[B, *event]`, numbers float32 `[B]`."""
    return forward(Step(v, x_next, x, v_ref, v_uncond, a, b, std, guidance), form=form, reduction=reduction)


@operation.register_fake
def _(v, x_next, x, v_ref, v_uncond, a, b, std, guidance, form, reduction):
    batch = v.shape[0]
    return v.new_empty(batch, dtype=torch.float32), v.new_empty(0 if v_ref is None else batch, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *step, form, reduction = inputs
    save(ctx, Saved(Step(*step)), form=form, reduction=reduction)


def _backward(ctx: Any, grad: Tensor | None, grad_kl: Tensor | None) -> tuple[Tensor | None, ...]:
    need_v, need_next, need_x, need_ref, need_uncond, *_ = ctx.needs_input_grad
    dv, dx, dnext, dref, duncond = input_gradients(ctx, grad, grad_kl, (need_v, need_x, need_next, need_ref, need_uncond))
    return dv, dnext, dx, dref, duncond, *[None] * 6


function = differentiable(operation, out_dims=(0, 0), setup_context=_setup_context, backward=_backward)


def step_log_prob(
    v: Samples,
    x: Samples,
    x_next: Samples,
    transition: Transition,
    *,
    v_ref: Samples | None,
    v_uncond: Samples | None,
    guidance: Tensor | None,
    form: str,
    reduction: str,
) -> tuple[PerSample, PerSample | None]:
    """Return log-prob and KL; arguments as `core.step.step_log_prob` takes them, already checked."""
    coefficients = [scalars(coefficient, v.shape[0]) for coefficient in transition]
    g = None if guidance is None else scalars(guidance, v.shape[0])
    log_prob, kl = function(v, x_next, x, v_ref, v_uncond, *coefficients, g, form, reduction)
    return log_prob, None if v_ref is None else kl
