"""One step of a sampler with its noise drawn where it is used, fused with its log-probability: `core.step.sde_step`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluvial.core.random import Key
from fluvial.core.transitions import Transition
from fluvial.core.types import PerSample, Samples
from fluvial.kernels.fused.device import load, normals, step_mean, velocity
from fluvial.kernels.fused.gaussian_step import Saved, Step, forward, input_gradients, save
from fluvial.kernels.fused.rows import operand, partition, row_length, scalars
from fluvial.kernels.fused.transforms import differentiable


@triton.jit
def draw(
    v_ptr, x_ptr, uncond_ptr,  # [B, N], rows s_* apart
    out_ptr,  # [B, N] float32, rows N apart
    a_ptr, b_ptr, std_ptr, g_ptr,  # [B] float32, s_* apart
    low_ptr, high_ptr,  # [B] int64, words of 32 bits
    s_v, s_x, s_uncond, s_a, s_b, s_std, s_g, s_low, s_high, length, chunks,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Store a x + b v + std z, z being the numbers of each sample's key."""
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    a, b, std = tl.load(a_ptr + row * s_a), tl.load(b_ptr + row * s_b), tl.load(std_ptr + row * s_std)
    low, high = tl.load(low_ptr + row * s_low).to(tl.uint32), tl.load(high_ptr + row * s_high).to(tl.uint32)
    g = 1.0
    if uncond_ptr is not None:
        g = tl.load(g_ptr + row * s_g)
    for i in tl.static_range(BLOCKS):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        mask = offset < length - start
        v = velocity(v_ptr, row * s_v + start, uncond_ptr, row * s_uncond + start, g, offset, mask)
        mean = step_mean(a, load(x_ptr, row * s_x + start, offset, mask), b, v)
        noise = normals(low, high, start + i * BLOCK, BLOCK)
        tl.store(out_ptr + row * length + start + offset, tl.fma(std, noise, mean), mask=mask)


@torch.library.custom_op("fluvial::sde_step", mutates_args=())
def operation(
    v: Tensor, x: Tensor, v_uncond: Tensor | None, a: Tensor, b: Tensor, std: Tensor, guidance: Tensor | None,
    low: Tensor, high: Tensor, form: str, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x_next, float32 `[B, *event]`, and its log-prob, float32 `[B]`.

    The log-prob is read back from the sample as stored, by the kernel that an update calls, so that an on-policy ratio is
    exactly 1: two kernels that add in one pass what the other adds in another need not agree to the bit.
    """
    batch, length = v.shape[0], row_length(v)
    x_next = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if batch > 0 and length > 0:
        cut = partition(length)
        operands = [operand(t) for t in (v, x, v_uncond, a, b, std, guidance, low, high)]
        pointers, strides = [t for t, _ in operands], [s for _, s in operands]
        draw[(batch * cut.chunks,)](
            *pointers[:3], x_next, *pointers[3:], *strides, length, cut.chunks,
            BLOCKS=cut.blocks, LEVELS=cut.levels, num_warps=cut.warps,
        )  # fmt: skip
    log_prob, _ = forward(Step(v, x_next, x, None, v_uncond, a, b, std, guidance), form=form, reduction=reduction)
    return x_next, log_prob


@operation.register_fake
def _(v, x, v_uncond, a, b, std, guidance, low, high, form, reduction):
    return torch.empty(v.shape, dtype=torch.float32, device=v.device), v.new_empty(v.shape[0], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    v, x, v_uncond, a, b, std, guidance, _, _, form, reduction = inputs
    save(ctx, Saved(Step(v, output[0], x, None, v_uncond, a, b, std, guidance)), form=form, reduction=reduction)


def _backward(ctx: Any, step_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    need_v, need_x, need_uncond, *_ = ctx.needs_input_grad
    needs = (need_v, need_x, False, False, need_uncond)
    dv, dx, _, _, duncond = input_gradients(ctx, grad, None, needs, step_grad=step_grad)
    return dv, dx, duncond, *[None] * 8


function = differentiable(operation, out_dims=(0, 0), setup_context=_setup_context, backward=_backward)


def sde_step(
    v: Samples,
    x: Samples,
    transition: Transition,
    key: Key,
    *,
    v_uncond: Samples | None,
    guidance: Tensor | None,
    form: str,
    reduction: str,
) -> tuple[Samples, PerSample]:
    """Return sample and log-prob; arguments as `core.step.sde_step` takes them, already checked, with a key a sample."""
    coefficients = [scalars(coefficient, v.shape[0]) for coefficient in transition]
    g = None if guidance is None else scalars(guidance, v.shape[0])
    low, high = (torch.as_tensor(word, device=v.device) for word in key)
    return function(v, x, v_uncond, *coefficients, g, low, high, form, reduction)
