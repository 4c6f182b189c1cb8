"""The log-probability of a step and its KL to the reference policy's step, fused: `core.step.step_log_prob`."""

from typing import Any

import torch
from torch import Tensor

from fluvial.kernels.fused.gaussian_step import Saved, StepInputs, forward, input_gradients, save
from fluvial.kernels.fused.transforms import differentiable, refuse_gradient_of_numbers


@torch.library.custom_op("fluvial::step_log_prob", mutates_args=())
def operation(
    a: Tensor, b: Tensor, std: Tensor, x: Tensor, v: Tensor, x_next: Tensor,
    v_ref: Tensor | None, v_uncond: Tensor | None, guidance: Tensor | None, form: str, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-prob and KL (`[0]` without v_ref), float32 `[B]`; samples are `[B, *event]`, numbers float32 `[B]`."""
    return forward(StepInputs(a, b, std, x, v, x_next, v_ref, v_uncond, guidance), form=form, reduction=reduction)


@operation.register_fake
def _(a, b, std, x, v, x_next, v_ref, v_uncond, guidance, form, reduction):
    batch = v.shape[0]
    return v.new_empty(batch, dtype=torch.float32), v.new_empty(0 if v_ref is None else batch, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *step, form, reduction = inputs
    save(ctx, Saved(StepInputs(*step)), form=form, reduction=reduction)


def _backward(ctx: Any, grad: Tensor | None, grad_kl: Tensor | None) -> tuple[Tensor | None, ...]:
    need_a, need_b, need_std, *needs, need_guidance, _, _ = ctx.needs_input_grad
    refuse_gradient_of_numbers((need_a, need_b, need_std, need_guidance))
    return None, None, None, *input_gradients(ctx, grad, grad_kl, needs), None, None, None


function = differentiable(operation, out_dims=(0, 0), setup_context=_setup_context, backward=_backward)
