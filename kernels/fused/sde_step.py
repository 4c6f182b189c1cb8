"""One step of a sampler, with its noise drawn inside the kernel, fused with its log-probability: `core.step.sde_step`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluvial.kernels.fused.device import is_last, load, normals, step_mean, sum_chunks, tree_sum, velocity
from fluvial.kernels.fused.gaussian_step import (
    FORMS,
    Saved,
    StepInputs,
    finish,
    input_gradients,
    reduction_weights,
    results,
    save,
)
from fluvial.kernels.fused.rows import EXACT, counters, on_device_of, operand, partition, row_length
from fluvial.kernels.fused.transforms import differentiable, refuse_gradient_of_numbers


@triton.jit
def draw(
    a_ptr, b_ptr, std_ptr,  # [B] float32, strides s_*
    x_ptr, v_ptr, uncond_ptr,  # [B, N], row strides s_*
    g_ptr,  # [B] float32, stride s_g
    low_ptr, high_ptr,  # [B] int64, words of 32 bits
    s_a, s_b, s_std, s_x, s_v, s_uncond, s_g, s_low, s_high,
    out_ptr,  # [B, N] float32, row stride N
    sums_ptr,  # [B, 2, chunks] float32, or None if a row is one chunk
    counter_ptr,  # [B] int32 zeros, reset to zeros; None if `finish` follows
    log_prob_ptr,  # [B] float32
    length, batch, chunks, inverse, count,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store a x + b v + std z, with the noise z of each sample's key, and its log-prob.

    The residual is computed from the sample as stored and summed term by term as in `residual_sums`, so that an on-policy
    ratio is exactly 1.
    """
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    a, b, std = tl.load(a_ptr + row * s_a), tl.load(b_ptr + row * s_b), tl.load(std_ptr + row * s_std)
    low, high = tl.load(low_ptr + row * s_low).to(tl.uint32), tl.load(high_ptr + row * s_high).to(tl.uint32)
    g = 1.0
    if uncond_ptr is not None:
        g = tl.load(g_ptr + row * s_g)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        mask = offset < length - start
        v = velocity(v_ptr, row * s_v + start, uncond_ptr, row * s_uncond + start, g, offset, mask)
        mean = step_mean(a, load(x_ptr, row * s_x + start, offset, mask), b, v)
        noise = normals(low, high, start + i * BLOCK, BLOCK)
        x_next = tl.fma(std, noise, mean)
        tl.store(out_ptr + row * length + start + offset, x_next, mask=mask)
        residual = tl.where(mask, x_next - mean, 0.0)
        squares = tl.fma(residual, residual, squares)
    square = tree_sum(squares, LEVELS)
    if sums_ptr is None:
        results(
            square, 0.0, row, batch, log_prob_ptr, None, b_ptr, std_ptr, None, None, None, s_b, s_std, 0, 0, 0,
            inverse, count, 0.0, 0.0, 0.0, FORM, False,
        )  # fmt: skip
    else:
        sums_ptr += 2 * row * chunks
        tl.store(sums_ptr + program % chunks, square)
        if counter_ptr is not None:  # noqa: SIM102 (the outer condition is a compile-time constant)
            if is_last(counter_ptr + row, chunks):
                results(
                    sum_chunks(sums_ptr, chunks, GROUP), 0.0, row, batch, log_prob_ptr, None, b_ptr, std_ptr, None, None,
                    None, s_b, s_std, 0, 0, 0, inverse, count, 0.0, 0.0, 0.0, FORM, False,
                )  # fmt: skip
                tl.store(counter_ptr + row, 0)


@torch.library.custom_op("fluvial::sde_step", mutates_args=())
def operation(
    a: Tensor, b: Tensor, std: Tensor, x: Tensor, v: Tensor, v_uncond: Tensor | None, guidance: Tensor | None,
    low: Tensor, high: Tensor, form: str, reduction: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x_next, float32 `[B, *event]`, and its log-prob, float32 `[B]`."""
    batch, length = v.shape[0], row_length(v)
    x_next = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    log_prob = x_next.new_empty(batch)
    if batch == 0:
        return x_next, log_prob
    cut = partition(length)
    partial = None if cut.chunks == 1 else x_next.new_empty((batch, 2, cut.chunks))
    counter = None if cut.chunks == 1 else counters(batch, v.device)
    operands = [operand(t) for t in (a, b, std, x, v, v_uncond, guidance, low, high)]
    pointers, strides = [t for t, _ in operands], [s for _, s in operands]
    weights = reduction_weights(length, reduction)
    with on_device_of(v):
        draw[(batch * cut.chunks,)](
            *pointers, *strides, x_next, partial, counter, log_prob, length, batch, cut.chunks, *weights,
            BLOCKS=cut.blocks, LEVELS=cut.levels, GROUP=cut.chunk_levels, FORM=FORMS[form], num_warps=cut.warps, **EXACT,
        )  # fmt: skip
        if partial is not None and counter is None:
            finish[(batch,)](
                partial, log_prob, None, *pointers[1:3], None, None, None, *strides[1:3], 0, 0, 0, batch, cut.chunks,
                *weights, 0.0, 0.0, 0.0,
                LEVELS=cut.chunk_levels, FORM=FORMS[form], HAS_REF=False, num_warps=cut.chunk_warps, **EXACT,
            )  # fmt: skip
    return x_next, log_prob


@operation.register_fake
def _(a, b, std, x, v, v_uncond, guidance, low, high, form, reduction):
    return torch.empty(v.shape, dtype=torch.float32, device=v.device), v.new_empty(v.shape[0], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    a, b, std, x, v, v_uncond, guidance, _, _, form, reduction = inputs
    save(ctx, Saved(StepInputs(a, b, std, x, v, output[0], None, v_uncond, guidance)), form=form, reduction=reduction)


def _backward(ctx: Any, step_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    need_a, need_b, need_std, need_x, need_v, need_uncond, *need_others = ctx.needs_input_grad
    refuse_gradient_of_numbers((need_a, need_b, need_std, *need_others))
    needs = (need_x, need_v, False, False, need_uncond)
    dx, dv, _, _, duncond = input_gradients(ctx, grad, None, needs, step_grad=step_grad)
    return None, None, None, dx, dv, duncond, *[None] * 5


function = differentiable(operation, out_dims=(0, 0), setup_context=_setup_context, backward=_backward)
