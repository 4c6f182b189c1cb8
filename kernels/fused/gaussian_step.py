"""The fused kernels of one step, x_next ~ N(a x + b v, std^2 I), which all samplers and most operations share.

    residual_sums  one pass over x, v, x_next (and v_ref, v_uncond), for the sums of r^2, r = x_next - a x - b v, and of
                   (v - v_ref)^2 per sample. With a single launch, the last program of a row also does the work of finish
    finish         log-prob and KL, or the policy loss and its diagnostics, from these sums; residual_sums does this itself
                   if a row is one chunk
    gradients      one pass for all gradients of these results

An operand that an operation lacks is None, and its branch is not compiled. Without x the residual is r = x_next - v, as
velocity_error needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluvial.kernels.fused.device import is_last, load, step_mean, sum_chunks, tree_sum, velocity
from fluvial.kernels.fused.rows import EXACT, counters, on_device_of, operand, partition, row_length
from fluvial.kernels.fused.transforms import differentiable

FORMS = {"density": 0, "no_const": 1, "unscaled": 2}
# Rows of a policy loss's diagnostics: ratio, log-ratio, clipped, KL to the old policy, KL to the reference policy, and
# d loss / d log-prob.
DIAGNOSTICS = 6


@triton.jit
def residual_sums(
    a_ptr, b_ptr, std_ptr,  # [B] float32, strides s_*
    x_ptr, v_ptr, next_ptr, ref_ptr, uncond_ptr,  # [B, N], row strides s_*
    g_ptr, old_ptr, advantage_ptr, kl_scale_ptr,  # [B] float32, strides s_*
    s_a, s_b, s_std, s_x, s_v, s_next, s_ref, s_uncond, s_g, s_old, s_advantage, s_kl_scale,
    sums_ptr,  # [B, 2, chunks] float32, or None if a row is one chunk
    counter_ptr,  # [B] int32 zeros, reset to zeros; None if `finish` follows
    out_ptr,  # [B] float32
    more_ptr,  # [.., B] float32, or None
    length, batch, chunks, inverse, count, clip_low, clip_high, kl_coef,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    a, b, g = 0.0, 1.0, 1.0
    if x_ptr is not None:
        a, b = tl.load(a_ptr + row * s_a), tl.load(b_ptr + row * s_b)
    if uncond_ptr is not None:
        g = tl.load(g_ptr + row * s_g)
    squares = tl.zeros([BLOCK], tl.float32)
    distances = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        mask = offset < length - start
        v = velocity(v_ptr, row * s_v + start, uncond_ptr, row * s_uncond + start, g, offset, mask)
        x_next = load(next_ptr, row * s_next + start, offset, mask)
        mean = v
        if x_ptr is not None:
            mean = step_mean(a, load(x_ptr, row * s_x + start, offset, mask), b, v)
        residual = x_next - mean
        squares = tl.fma(residual, residual, squares)
        if ref_ptr is not None:
            away = v - load(ref_ptr, row * s_ref + start, offset, mask)
            distances = tl.fma(away, away, distances)
    square = tree_sum(squares, LEVELS)
    distance = 0.0
    if ref_ptr is not None:
        distance = tree_sum(distances, LEVELS)
    if sums_ptr is None:
        results(
            square, distance, row, batch, out_ptr, more_ptr, b_ptr, std_ptr, old_ptr, advantage_ptr, kl_scale_ptr,
            s_b, s_std, s_old, s_advantage, s_kl_scale, inverse, count, clip_low, clip_high, kl_coef, FORM,
            ref_ptr is not None,
        )  # fmt: skip
    else:
        sums_ptr += 2 * row * chunks
        tl.store(sums_ptr + program % chunks, square)
        if ref_ptr is not None:
            tl.store(sums_ptr + chunks + program % chunks, distance)
        if counter_ptr is not None:  # noqa: SIM102 (the outer condition is a compile-time constant)
            if is_last(counter_ptr + row, chunks):
                all_squares = sum_chunks(sums_ptr, chunks, GROUP)
                all_distances = 0.0
                if ref_ptr is not None:
                    all_distances = sum_chunks(sums_ptr + chunks, chunks, GROUP)
                results(
                    all_squares, all_distances, row, batch, out_ptr, more_ptr, b_ptr, std_ptr, old_ptr, advantage_ptr,
                    kl_scale_ptr, s_b, s_std, s_old, s_advantage, s_kl_scale, inverse, count, clip_low, clip_high, kl_coef,
                    FORM, ref_ptr is not None,
                )  # fmt: skip
                tl.store(counter_ptr + row, 0)


@triton.jit
def finish(
    sums_ptr, out_ptr, more_ptr, b_ptr, std_ptr, old_ptr, advantage_ptr, kl_scale_ptr,
    s_b, s_std, s_old, s_advantage, s_kl_scale, batch, chunks, inverse, count, clip_low, clip_high, kl_coef,
    LEVELS: tl.constexpr, FORM: tl.constexpr, HAS_REF: tl.constexpr,
):  # fmt: skip
    """Add up a row's chunks, in order, and store the results of the row."""
    row = tl.program_id(0).to(tl.int64)
    square = sum_chunks(sums_ptr + 2 * row * chunks, chunks, LEVELS)
    distance = 0.0
    if HAS_REF:
        distance = sum_chunks(sums_ptr + (2 * row + 1) * chunks, chunks, LEVELS)
    results(
        square, distance, row, batch, out_ptr, more_ptr, b_ptr, std_ptr, old_ptr, advantage_ptr, kl_scale_ptr,
        s_b, s_std, s_old, s_advantage, s_kl_scale, inverse, count, clip_low, clip_high, kl_coef, FORM, HAS_REF,
    )  # fmt: skip


@triton.jit
def results(
    square, distance, row, batch, out_ptr, more_ptr, b_ptr, std_ptr, old_ptr, advantage_ptr, kl_scale_ptr,
    s_b, s_std, s_old, s_advantage, s_kl_scale, inverse, count, clip_low, clip_high, kl_coef,
    FORM: tl.constexpr, HAS_REF: tl.constexpr,
):  # fmt: skip
    """Store a sample's results from its two sums: the error, log-prob and KL, or the policy loss and its diagnostics."""
    log_prob = -square * inverse
    kl = 0.0
    if std_ptr is None:
        tl.store(out_ptr + row, -log_prob)
    else:
        std = positive(std_ptr + row * s_std)
        if FORM != 2:
            log_prob = log_prob / (2 * std * std)
        if FORM == 0:
            log_prob = tl.fma(-count, tl.log(std) + 0.9189385332046727, log_prob)  # log(2 pi) / 2
        if HAS_REF:
            b = tl.load(b_ptr + row * s_b)
            kl = b * b * distance * inverse / (2 * std * std)
        if old_ptr is None:
            tl.store(out_ptr + row, log_prob)
            if HAS_REF:
                tl.store(more_ptr + row, kl)
        else:
            advantage = tl.load(advantage_ptr + row * s_advantage)
            log_ratio = log_prob - tl.load(old_ptr + row * s_old)
            ratio = tl.exp(_min(log_ratio, 80.0))
            free = -advantage * ratio
            held = -advantage * _min(_max(ratio, 1 - clip_low), 1 + clip_high)
            loss = _max(free, held)
            if HAS_REF:
                loss = loss + kl_coef * tl.load(kl_scale_ptr + row * s_kl_scale) * kl
            clipped = held > free
            tl.store(out_ptr + row, loss)
            tl.store(more_ptr + row, ratio)
            tl.store(more_ptr + batch + row, log_ratio)
            tl.store(more_ptr + 2 * batch + row, clipped.to(tl.float32))
            tl.store(more_ptr + 3 * batch + row, _exp_minus_one_minus(log_ratio))
            tl.store(more_ptr + 4 * batch + row, kl)
            tl.store(more_ptr + 5 * batch + row, tl.where(clipped | ~(log_ratio <= 80.0), 0.0, free))


@triton.jit
def gradients(
    a_ptr, b_ptr, std_ptr,  # [B] float32, strides s_*
    x_ptr, v_ptr, next_ptr, ref_ptr, uncond_ptr,  # [B, N], row strides s_*
    g_ptr, grad_ptr, grad_kl_ptr, slope_ptr, kl_scale_ptr,  # [B] float32, strides s_*
    step_ptr,  # [B, N], row stride s_step: gradient of x_next as a result of the step, or None
    s_a, s_b, s_std, s_x, s_v, s_next, s_ref, s_uncond, s_g, s_grad, s_grad_kl, s_slope, s_kl_scale, s_step,
    dx_ptr, dv_ptr, dnext_ptr, dref_ptr, duncond_ptr,  # [B, N], row stride N; None where not needed
    length, chunks, inverse, kl_coef,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store the gradients that are needed, from the gradients of a sample's results.

    d log_prob / d mean = r / std^2 (unscaled: 2 r),  d kl / d v = b^2 (v - v_ref) / std^2,  over N for a mean
    """
    BLOCK: tl.constexpr = 1 << LEVELS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    written = row * length + start
    a, b, g = 0.0, 1.0, 1.0
    pull = 0.0  # times r is the gradient of the mean
    push = 0.0  # times v - v_ref is the KL's gradient of v
    if a_ptr is not None:
        a, b = tl.load(a_ptr + row * s_a), tl.load(b_ptr + row * s_b)
    if grad_ptr is not None:
        pull = tl.load(grad_ptr + row * s_grad) * inverse
        if ref_ptr is not None and slope_ptr is not None:
            std = positive(std_ptr + row * s_std)
            push = pull * kl_coef * tl.load(kl_scale_ptr + row * s_kl_scale) * b * b / (std * std)
        if slope_ptr is not None:
            pull = pull * tl.load(slope_ptr + row * s_slope)
        if a_ptr is None:
            pull = -2 * pull
        elif FORM == 2:
            pull = 2 * pull
        else:
            std = positive(std_ptr + row * s_std)
            pull = pull / (std * std)
    if grad_kl_ptr is not None:
        std = positive(std_ptr + row * s_std)
        push = tl.load(grad_kl_ptr + row * s_grad_kl) * inverse * b * b / (std * std)
    if uncond_ptr is not None:
        g = tl.load(g_ptr + row * s_g)
    for i in tl.static_range(BLOCKS):
        offset = tl.arange(0, BLOCK) + i * BLOCK
        mask = offset < length - start
        v = velocity(v_ptr, row * s_v + start, uncond_ptr, row * s_uncond + start, g, offset, mask)
        dmean = tl.zeros([BLOCK], tl.float32)
        if grad_ptr is not None:
            mean = v
            if x_ptr is not None:
                mean = step_mean(a, load(x_ptr, row * s_x + start, offset, mask), b, v)
            dmean = pull * (load(next_ptr, row * s_next + start, offset, mask) - mean)
        if dnext_ptr is not None:
            _store(dnext_ptr, written, offset, -dmean, mask)
        if step_ptr is not None:
            dmean += load(step_ptr, row * s_step + start, offset, mask)
        if dx_ptr is not None:
            _store(dx_ptr, written, offset, a * dmean, mask)
        dv = b * dmean
        if ref_ptr is not None:
            dkl = push * (v - load(ref_ptr, row * s_ref + start, offset, mask))
            dv += dkl
            if dref_ptr is not None:
                _store(dref_ptr, written, offset, -dkl, mask)
        if dv_ptr is not None:
            _store(dv_ptr, written, offset, g * dv, mask)
        if duncond_ptr is not None:
            _store(duncond_ptr, written, offset, dv - g * dv, mask)


@triton.jit
def positive(std_ptr):
    """Return a std, or NaN if it is not positive, because a deterministic step has no density."""
    std = tl.load(std_ptr)
    return tl.where(std > 0, std, float("nan"))


@triton.jit
def _store(ptr, start, offset, value, mask):
    tl.store(ptr + start + offset, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp_minus_one_minus(x):
    """Return exp(x) - 1 - x, by its series near 0, where a policy's log-ratio lies."""
    series = x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x / 720))))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1 - x)


class StepInputs(NamedTuple):
    """The tensors of a step; None where an operation lacks one."""

    a: Tensor | None  # [B] float32; so are b, std and guidance
    b: Tensor | None
    std: Tensor | None
    x: Tensor | None  # [B, *event]; so are v, x_next, v_ref and v_uncond
    v: Tensor
    x_next: Tensor
    v_ref: Tensor | None = None
    v_uncond: Tensor | None = None
    guidance: Tensor | None = None


class Policy(NamedTuple):
    """The further arguments of a policy loss; tensors `[B]` float32."""

    log_prob_old: Tensor
    advantage: Tensor
    kl_scale: Tensor
    clip_low: float
    clip_high: float
    kl_coef: float


def reduction_weights(length: int, reduction: str) -> tuple[float, float]:
    """Return the factors of a sample's sum of squares and of the density's constant."""
    return (1 / length, 1.0) if reduction == "mean" else (1.0, float(length))


def forward(
    step: StepInputs, *, form: str = "unscaled", reduction: str = "mean", policy: Policy | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the forward pass and return two float32 results.

    They are the mean squared error `[B]` and `[0]` (without x), the log-prob `[B]` and the KL `[B]` (`[0]` without v_ref),
    or a policy's loss `[B]` and its diagnostics `[DIAGNOSTICS, B]`.
    """
    batch, length = step.v.shape[0], row_length(step.v)
    out = step.v.new_empty(batch, dtype=torch.float32)
    more = out.new_empty((DIAGNOSTICS, batch) if policy else 0 if step.v_ref is None else batch)
    if batch == 0:
        return out, more
    cut = partition(length)
    partial = None if cut.chunks == 1 else out.new_empty((batch, 2, cut.chunks))
    counter = None if cut.chunks == 1 else counters(batch, out.device)
    *of_policy, clip_low, clip_high, kl_coef = policy or (None, None, None, 0.0, 0.0, 0.0)
    operands = [operand(t) for t in (*step, *of_policy)]
    pointers, strides = [t for t, _ in operands], [s for _, s in operands]
    weights = (*reduction_weights(length, reduction), clip_low, clip_high, kl_coef)
    with on_device_of(step.v):
        residual_sums[(batch * cut.chunks,)](
            *pointers, *strides, partial, counter, out, more, length, batch, cut.chunks, *weights,
            BLOCKS=cut.blocks, LEVELS=cut.levels, GROUP=cut.chunk_levels, FORM=FORMS[form], num_warps=cut.warps, **EXACT,
        )  # fmt: skip
        if partial is not None and counter is None:
            finish[(batch,)](
                partial, out, more, *pointers[1:3], *pointers[-3:],  # b and std; the policy's
                *strides[1:3], *strides[-3:], batch, cut.chunks, *weights,
                LEVELS=cut.chunk_levels, FORM=FORMS[form], HAS_REF=step.v_ref is not None,
                num_warps=cut.chunk_warps, **EXACT,
            )  # fmt: skip
    return out, more


@torch.library.custom_op("fluvial::step_gradients", mutates_args=())
def step_gradients_operation(
    grad: Tensor | None, grad_kl: Tensor | None, slope: Tensor | None, kl_scale: Tensor | None, step_grad: Tensor | None,
    a: Tensor | None, b: Tensor | None, std: Tensor | None, x: Tensor | None, v: Tensor, x_next: Tensor,
    v_ref: Tensor | None, v_uncond: Tensor | None, guidance: Tensor | None,
    kl_coef: float, form: str, reduction: str,
    need_x: bool, need_v: bool, need_next: bool, need_ref: bool, need_uncond: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward pass and return the needed gradients of (x, v, x_next, v_ref, v_uncond), the others empty.

    Args:
        grad, grad_kl: gradients of the log-prob (or error or policy loss) and of the KL, `[B]`.
        slope, kl_scale, kl_coef: for a policy loss, d loss / d log-prob and the weight of the KL, |dt| or 1 and kl_coef.
        step_grad: gradient of x_next as a result of the step, `[B, *event]`.
    """
    batch, length = v.shape[0], row_length(v)
    grad_kl = None if v_ref is None else grad_kl
    # An operand without a gradient path is not read, so that an infinity in it cannot reach the other gradients.
    no_kl = grad_kl is None and slope is None
    read_x, read_next = (None, None) if grad is None else (x, x_next)
    read = (a, b, std, read_x, v, read_next, None if no_kl else v_ref, v_uncond, guidance)
    inputs = ((x, need_x), (v, need_v), (x_next, need_next), (v_ref, need_ref), (v_uncond, need_uncond))
    wanted = [None if tensor is None or not need else tensor.new_empty(tensor.shape) for tensor, need in inputs]
    if wanted[3] is not None and no_kl:
        wanted[3].zero_()
    if batch > 0 and length > 0 and any(tensor is not None for tensor in wanted):
        cut = partition(length)
        operands = [operand(t) for t in (*read, grad, grad_kl, slope, kl_scale, step_grad)]
        with on_device_of(v):
            gradients[(batch * cut.chunks,)](
                *(t for t, _ in operands), *(s for _, s in operands), *wanted,
                length, cut.chunks, reduction_weights(length, reduction)[0], kl_coef,
                BLOCKS=cut.blocks, LEVELS=cut.levels, FORM=FORMS[form], num_warps=cut.warps, **EXACT,
            )  # fmt: skip
    dx, dv, dnext, dref, duncond = (v.new_empty(0) if tensor is None else tensor for tensor in wanted)
    return dx, dv, dnext, dref, duncond


@step_gradients_operation.register_fake
def _(
    grad, grad_kl, slope, kl_scale, step_grad, a, b, std, x, v, x_next, v_ref, v_uncond, guidance, kl_coef, form, reduction,
    need_x, need_v, need_next, need_ref, need_uncond,
):  # fmt: skip
    inputs = ((x, need_x), (v, need_v), (x_next, need_next), (v_ref, need_ref), (v_uncond, need_uncond))
    return tuple(t.new_empty(t.shape) if need and t is not None else v.new_empty(0) for t, need in inputs)


step_gradients = differentiable(step_gradients_operation, out_dims=(0, 0, 0, 0, 0))


class Saved(NamedTuple):
    """The tensors of the forward pass that an operation's backward pass needs."""

    step: StepInputs
    slope: Tensor | None = None
    kl_scale: Tensor | None = None


def save(ctx: Any, saved: Saved, **options: Any) -> None:
    """Save the tensors (inputs and per-sample numbers) and the options for the backward pass."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved.step, saved.slope, saved.kl_scale)
    ctx.options = options


def input_gradients(
    ctx: Any,
    grad: Tensor | None,
    grad_kl: Tensor | None,
    needs: Sequence[bool],
    *,
    step_grad: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients of (x, v, x_next, v_ref, v_uncond) from the tensors of `save`, None where not needed."""
    *step, slope, kl_scale = ctx.saved_tensors
    options = ctx.options
    results = step_gradients(
        grad, grad_kl, slope, kl_scale, step_grad, *step,
        options.get("kl_coef", 0.0), options["form"], options["reduction"], *needs,
    )  # fmt: skip
    return [result if need else None for result, need in zip(results, needs, strict=True)]
