"""The loss of DiffusionNFT, fused: `core.nft.nft_loss`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluvial.kernels.fused.device import is_last, load, sum_chunks, tree_sum
from fluvial.kernels.fused.rows import EXACT, counters, on_device_of, operand, partition, row_length
from fluvial.kernels.fused.transforms import differentiable, refuse_gradient_of_numbers

SUMS = 4  # |x0+ - x0|, (x0+ - x0)^2, |x0- - x0|, (x0- - x0)^2


@triton.jit
def error_sums(
    v_ptr, old_ptr, x0_ptr, xt_ptr,  # [B, N], row strides s_*
    sums_ptr,  # [B, 4, chunks] float32, or None if a row is one chunk
    counter_ptr,  # [B] int32 zeros, reset to zeros; None if `finish` follows
    loss_ptr,  # [B] float32
    weights_ptr,  # [B, 2] float32: w+, w-
    t_ptr, prob_ptr,  # [B] float32, strides s_*
    s_v, s_old, s_x0, s_xt, s_t, s_prob, length, chunks, inverse, beta, scale, weight_min,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store each sample's loss; with several chunks per row, their four sums, and the loss in the last program."""
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    t = tl.load(t_ptr + row * s_t)
    positive_abs = tl.zeros([BLOCK // 2], tl.float32)
    positive_sq = tl.zeros([BLOCK // 2], tl.float32)
    negative_abs = tl.zeros([BLOCK // 2], tl.float32)
    negative_sq = tl.zeros([BLOCK // 2], tl.float32)
    # Unrolled loads and sums of full blocks would take twice the registers and halve the programs per multiprocessor.
    for i in tl.range(BLOCKS, loop_unroll_factor=1):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        positive, negative = _errors(
            v_ptr + row * s_v + start, old_ptr + row * s_old + start, x0_ptr + row * s_x0 + start,
            xt_ptr + row * s_xt + start, t, beta, offset, offset < length - start,
        )  # fmt: skip
        positive_abs += _neighbours(tl.abs(positive), LEVELS)
        positive_sq += _neighbours(positive * positive, LEVELS)
        negative_abs += _neighbours(tl.abs(negative), LEVELS)
        negative_sq += _neighbours(negative * negative, LEVELS)
    sums = (
        tree_sum(positive_abs, LEVELS - 1),
        tree_sum(positive_sq, LEVELS - 1),
        tree_sum(negative_abs, LEVELS - 1),
        tree_sum(negative_sq, LEVELS - 1),
    )
    if sums_ptr is None:
        _loss(sums, row, loss_ptr, weights_ptr, prob_ptr, s_prob, inverse, scale, weight_min)
    else:
        sums_ptr += 4 * row * chunks
        for k in tl.static_range(4):
            tl.store(sums_ptr + k * chunks + program % chunks, sums[k])
        if counter_ptr is not None:  # noqa: SIM102 (the outer condition is a compile-time constant)
            if is_last(counter_ptr + row, chunks):
                _loss(
                    _all_sums(sums_ptr, chunks, GROUP), row, loss_ptr, weights_ptr, prob_ptr, s_prob, inverse, scale,
                    weight_min,
                )  # fmt: skip
                tl.store(counter_ptr + row, 0)


@triton.jit
def _neighbours(values, LEVELS: tl.constexpr):
    """Return the sums of neighbouring pairs of 2^LEVELS values."""
    return tl.sum(tl.reshape(values, [1 << (LEVELS - 1), 2]), 1)


@triton.jit
def finish(
    sums_ptr, loss_ptr, weights_ptr, prob_ptr, s_prob, chunks, inverse, scale, weight_min, LEVELS: tl.constexpr
):  # fmt: skip
    """Add up a row's chunks, in order, and store its loss."""
    row = tl.program_id(0).to(tl.int64)
    sums = _all_sums(sums_ptr + 4 * row * chunks, chunks, LEVELS)
    _loss(sums, row, loss_ptr, weights_ptr, prob_ptr, s_prob, inverse, scale, weight_min)


@triton.jit
def _all_sums(sums_ptr, chunks, LEVELS: tl.constexpr):
    """Return the four sums of a row."""
    return (
        sum_chunks(sums_ptr, chunks, LEVELS),
        sum_chunks(sums_ptr + chunks, chunks, LEVELS),
        sum_chunks(sums_ptr + 2 * chunks, chunks, LEVELS),
        sum_chunks(sums_ptr + 3 * chunks, chunks, LEVELS),
    )


@triton.jit
def gradient(
    v_ptr, old_ptr, x0_ptr, xt_ptr,  # [B, N], row strides s_*
    dv_ptr,  # [B, N], row stride N
    weights_ptr,  # [B, 2] float32
    t_ptr, prob_ptr, grad_ptr,  # [B] float32, strides s_*
    s_v, s_old, s_x0, s_xt, s_t, s_prob, s_grad, length, chunks, inverse, beta, scale,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Store d loss / d v = 2 t beta scale / N (-r (x0+ - x0) / w+  +  (1 - r) (x0- - x0) / w-)."""
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    t, prob = tl.load(t_ptr + row * s_t), tl.load(prob_ptr + row * s_prob)
    slope = tl.load(grad_ptr + row * s_grad) * (2 * t * beta * scale * inverse)
    of_positive = -slope * prob / tl.load(weights_ptr + 2 * row)
    of_negative = slope * (1 - prob) / tl.load(weights_ptr + 2 * row + 1)
    for i in tl.static_range(BLOCKS):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        mask = offset < length - start
        positive, negative = _errors(
            v_ptr + row * s_v + start, old_ptr + row * s_old + start, x0_ptr + row * s_x0 + start,
            xt_ptr + row * s_xt + start, t, beta, offset, mask,
        )  # fmt: skip
        dv = tl.fma(of_positive, positive, of_negative * negative)
        tl.store(dv_ptr + row * length + start + offset, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _errors(v_ptr, old_ptr, x0_ptr, xt_ptr, t, beta, offset, mask):
    """Return x0+ - x0 and x0- - x0: with d = beta (v - v_old), v+ is v_old + d and v- is v_old - d."""
    old = load(old_ptr, 0, offset, mask)
    away = beta * (load(v_ptr, 0, offset, mask) - old)
    base = load(xt_ptr, 0, offset, mask) - load(x0_ptr, 0, offset, mask)
    return tl.fma(-t, old + away, base), tl.fma(-t, old - away, base)


@triton.jit
def _loss(sums, row, loss_ptr, weights_ptr, prob_ptr, s_prob, inverse, scale, weight_min):
    prob = tl.load(prob_ptr + row * s_prob)
    positive = tl.maximum(sums[0] * inverse, weight_min, propagate_nan=tl.PropagateNan.ALL)
    negative = tl.maximum(sums[2] * inverse, weight_min, propagate_nan=tl.PropagateNan.ALL)
    loss = prob * (sums[1] * inverse) / positive + (1 - prob) * (sums[3] * inverse) / negative
    tl.store(loss_ptr + row, scale * loss)
    tl.store(weights_ptr + 2 * row, positive)
    tl.store(weights_ptr + 2 * row + 1, negative)


@torch.library.custom_op("fluvial::nft_loss", mutates_args=())
def operation(
    v: Tensor, v_old: Tensor, x0: Tensor, xt: Tensor, t: Tensor, reward_prob: Tensor,
    beta: float, adv_clip: float, weight_min: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss, float32 `[B]`, and the weights w+ and w-, float32 `[B, 2]`."""
    batch, length = v.shape[0], row_length(v)
    loss, weights = (v.new_empty(shape, dtype=torch.float32) for shape in ((batch,), (batch, 2)))
    if batch == 0:
        return loss, weights
    cut = partition(length)
    partial = None if cut.chunks == 1 else loss.new_empty((batch, SUMS, cut.chunks))
    counter = None if cut.chunks == 1 else counters(batch, v.device)
    operands = [operand(tensor) for tensor in (v, v_old, x0, xt, t, reward_prob)]
    (*samples, t_rows, prob), strides = [r for r, _ in operands], [s for _, s in operands]
    inverse, scale = 1 / length, adv_clip / beta
    with on_device_of(v):
        error_sums[(batch * cut.chunks,)](
            *samples, partial, counter, loss, weights, t_rows, prob, *strides, length, cut.chunks, inverse, beta, scale,
            weight_min, BLOCKS=cut.blocks, LEVELS=cut.levels, GROUP=cut.chunk_levels, num_warps=cut.warps, **EXACT,
        )  # fmt: skip
        if partial is not None and counter is None:
            finish[(batch,)](
                partial, loss, weights, prob, strides[-1], cut.chunks, inverse, scale, weight_min,
                LEVELS=cut.chunk_levels, num_warps=cut.chunk_warps, **EXACT,
            )  # fmt: skip
    return loss, weights


@operation.register_fake
def _(v, v_old, x0, xt, t, reward_prob, beta, adv_clip, weight_min):
    batch = v.shape[0]
    return v.new_empty(batch, dtype=torch.float32), v.new_empty((batch, 2), dtype=torch.float32)


@torch.library.custom_op("fluvial::nft_loss_gradient", mutates_args=())
def gradient_operation(
    grad: Tensor, v: Tensor, v_old: Tensor, x0: Tensor, xt: Tensor, t: Tensor, reward_prob: Tensor,
    weights: Tensor, beta: float, adv_clip: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of v."""
    batch, length = v.shape[0], row_length(v)
    dv = v.new_empty(v.shape)
    if batch > 0 and length > 0:
        cut = partition(length)
        operands = [operand(tensor) for tensor in (v, v_old, x0, xt, t, reward_prob, grad)]
        (*samples, t_rows, prob, grad_rows), strides = [r for r, _ in operands], [s for _, s in operands]
        with on_device_of(v):
            gradient[(batch * cut.chunks,)](
                *samples, dv, weights.contiguous(), t_rows, prob, grad_rows, *strides, length, cut.chunks, 1 / length,
                beta, adv_clip / beta, BLOCKS=cut.blocks, LEVELS=cut.levels, num_warps=cut.warps, **EXACT,
            )  # fmt: skip
    return dv


@gradient_operation.register_fake
def _(grad, v, v_old, x0, xt, t, reward_prob, weights, beta, adv_clip):
    return v.new_empty(v.shape)


gradient_function = differentiable(gradient_operation, out_dims=(0,))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, beta, adv_clip, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (beta, adv_clip)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_gradient_of_numbers(ctx.needs_input_grad[4:])
    dv = None if grad is None else gradient_function(grad, *ctx.saved_tensors, *ctx.options)
    return dv, *[None] * 8


function = differentiable(operation, out_dims=(0, 0), setup_context=_setup_context, backward=_backward)
