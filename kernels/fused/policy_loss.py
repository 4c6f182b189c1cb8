"""The clipped policy loss of stored pairs with its KL term, fused from velocity to loss: `core.step.policy_loss`."""

from typing import Any

import torch
from torch import Tensor

from fluvial.kernels.fused.gaussian_step import DIAGNOSTICS, Policy, Saved, StepInputs, forward, input_gradients, save
from fluvial.kernels.fused.transforms import differentiable, refuse_gradient_of_numbers


@torch.library.custom_op("fluvial::policy_loss", mutates_args=())
def operation(
    a: Tensor, b: Tensor, std: Tensor, x: Tensor, v: Tensor, x_next: Tensor,
    v_ref: Tensor | None, v_uncond: Tensor | None, guidance: Tensor | None,
    log_prob_old: Tensor, advantage: Tensor, kl_scale: Tensor,
    clip_low: float, clip_high: float, kl_coef: float, form: str, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss, float32 `[B]`, and float32 `[6, B]`: the diagnostics and d loss / d log-prob."""
    return forward(
        StepInputs(a, b, std, x, v, x_next, v_ref, v_uncond, guidance), form=form, reduction=reduction,
        policy=Policy(log_prob_old, advantage, kl_scale, clip_low, clip_high, kl_coef),
    )  # fmt: skip


@operation.register_fake
def _(
    a, b, std, x, v, x_next, v_ref, v_uncond, guidance, log_prob_old, advantage, kl_scale, clip_low, clip_high, kl_coef,
    form, reduction,
):  # fmt: skip
    batch = v.shape[0]
    return v.new_empty(batch, dtype=torch.float32), v.new_empty((DIAGNOSTICS, batch), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    step, kl_scale, (kl_coef, form, reduction) = StepInputs(*inputs[:9]), inputs[11], inputs[14:]
    save(ctx, Saved(step, slope=output[1][5], kl_scale=kl_scale), kl_coef=kl_coef, form=form, reduction=reduction)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_a, need_b, need_std, *needs = ctx.needs_input_grad[:8]
    refuse_gradient_of_numbers((need_a, need_b, need_std, *ctx.needs_input_grad[8:]))
    return None, None, None, *input_gradients(ctx, grad, None, needs), *[None] * 9


function = differentiable(operation, out_dims=(0, 1), setup_context=_setup_context, backward=_backward)
