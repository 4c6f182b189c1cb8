"""The mean squared error of a velocity, fused: `core.flow_matching.velocity_error`."""

from typing import Any

import torch
from torch import Tensor

from fluvial.kernels.fused.gaussian_step import Saved, StepInputs, forward, input_gradients, save
from fluvial.kernels.fused.transforms import differentiable


@torch.library.custom_op("fluvial::velocity_error", mutates_args=())
def operation(v: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (v - target)^2, float32 `[B]`; samples are `[B, *event]`."""
    return forward(_difference(v, target))[0]


@operation.register_fake
def _(v, target):
    return v.new_empty(v.shape[0], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    save(ctx, Saved(_difference(*inputs)), form="unscaled", reduction="mean")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, dv, dtarget, _, _ = input_gradients(ctx, grad, None, (False, *ctx.needs_input_grad, False, False))
    return dv, dtarget


def _difference(v: Tensor, target: Tensor) -> StepInputs:
    """Return a step without x, whose residual is target - v."""
    return StepInputs(a=None, b=None, std=None, x=None, v=v, x_next=target)


function = differentiable(operation, out_dims=(0,), setup_context=_setup_context, backward=_backward)
