"""Schedules: T+1 noise levels from near 1 down to exactly 0, float32 on the CPU, and the window of stochastic steps."""

import math
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.checks import can_look, check_choice, check_number
from fluvial.core.random import Key, host_uniforms
from fluvial.core.types import Grid


def linear(T: int) -> Grid:
    """Return T+1 evenly spaced noise levels, 1 down to 0."""
    return _make_linear(T).to(torch.float32)


def shifted(T: int, shift: float) -> Grid:
    """Return the linear schedule shifted towards noise, s -> shift s / (1 + (shift - 1) s) (SD3, arXiv 2403.03206).

    diffusers' SD3 pipeline samples with `shifted_twice` instead.

    Args:
        T: number of steps.
        shift: > 0; 1 is `linear`.
    """
    check_number("shifted", "shift", shift, low=1e-9)
    return _shift(_make_linear(T), shift).to(torch.float32)


def shifted_twice(T: int, shift: float, *, train_timesteps: int = 1000) -> Grid:
    """Return the schedule that diffusers' SD3 pipeline samples with: T levels falling from 1, then 0.

        s_min = f(1 / train_timesteps),  s_i = f(1 + (s_min - 1) i / (T - 1)),  f(s) = shift s / (1 + (shift - 1) s)

    The lowest training level is itself shifted before the levels are spaced and shifted again, so the last step is longer
    than with `shifted`.

    Args:
        T: number of steps, >= 2.
        shift: > 0; SD3 and SD3.5 use 3.
        train_timesteps: number of timesteps that the model was trained with.

    Source: FlowMatchEulerDiscreteScheduler.set_timesteps of diffusers.
    """
    check_number("shifted_twice", "shift", shift, low=1e-9)
    check_number("shifted_twice", "train_timesteps", train_timesteps, low=2)
    if T < 2:
        raise ValueError(f"shifted_twice: T is {T}, expected at least 2")
    least = float(_shift(torch.tensor(1 / train_timesteps, dtype=torch.float64), shift))
    levels = _shift(torch.linspace(1, least, T, dtype=torch.float64), shift)
    return torch.cat([levels, levels.new_zeros(1)]).to(torch.float32)


def dynamic_shift(
    T: int,
    seq_len: int,
    *,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    kind: Literal["exponential", "linear"] = "exponential",
    shift_terminal: float | None = None,
) -> Grid:
    """Return the linear schedule shifted by the number of image tokens, as FLUX and Qwen-Image do.

        mu = base_shift + (seq_len - base_seq_len) (max_shift - base_shift) / (max_seq_len - base_seq_len)
        s -> m / (m + 1/s - 1),  m = exp(mu) ("exponential") or mu ("linear")

    Args:
        T: number of steps.
        seq_len: image tokens per sample.
        base_seq_len, max_seq_len, base_shift, max_shift: two points that define the line for mu.
        kind: how mu gives m, as above.
        shift_terminal: level at which the last step starts: every level s becomes 1 - (1 - s) (1 - shift_terminal) / (1 -
            s_last). It is 0.02 for Qwen-Image; None, as for FLUX, leaves the levels unchanged.

    Source: FlowMatchEulerDiscreteScheduler of diffusers (time_shift, stretch_shift_to_terminal), and its defaults.
    """
    check_choice("dynamic_shift", "kind", kind, ("exponential", "linear"))
    mu = base_shift + (seq_len - base_seq_len) * (max_shift - base_shift) / (max_seq_len - base_seq_len)
    shift = math.exp(mu) if kind == "exponential" else mu
    if shift_terminal is None:
        return shifted(T, shift)
    check_number("dynamic_shift", "shift_terminal", shift_terminal, low=1e-9, high=1 - 1e-9)
    if T < 2:
        raise ValueError(f"dynamic_shift: T is {T}, expected at least 2 with shift_terminal")
    levels = _shift(_make_linear(T), shift)[:-1]
    stretched = 1 - (1 - levels) * (1 - shift_terminal) / (1 - levels[-1])
    return torch.cat([stretched, stretched.new_zeros(1)]).to(torch.float32)


def from_scheduler(scheduler) -> Grid:  # type: ignore[no-untyped-def]  # importing diffusers takes a second
    """Return exactly the sigmas that a diffusers FlowMatchEulerDiscreteScheduler steps through, float32 `[T+1]`.

    Call its `set_timesteps` first. The model's timestep at step i is `scheduler.timesteps[i]`, which is not always
    1000 sigma.

    Raises:
        ValueError: `set_timesteps` was not called, or the schedule is not one of falling noise levels ending in 0.
    """
    if len(scheduler.sigmas) != len(scheduler.timesteps) + 1:
        raise ValueError("from_scheduler: the scheduler has no schedule yet: call its set_timesteps(...) first")
    sigmas = scheduler.sigmas.to(torch.float32)
    check_sigmas(sigmas)
    return sigmas


def check_sigmas(sigmas: Tensor) -> None:
    """Raise ValueError unless sigmas is a schedule: `[T+1]`, in [0, 1], strictly falling, its last value exactly 0.

    With a level per block it is `[T+1, R]`. Values are checked where they are known, see `checks.can_look`.
    """
    if sigmas.ndim not in (1, 2) or len(sigmas) < 2:
        raise ValueError(f"sigmas have shape {list(sigmas.shape)}, expected [T+1] with T >= 1")
    if not can_look(sigmas):
        return
    if not (torch.isfinite(sigmas).all() and (sigmas[0] <= 1).all() and (sigmas[-1] == 0).all()):
        first, last = sigmas[0].max(), sigmas[-1].max()
        raise ValueError(f"sigmas run from {first:g} to {last:g}, expected from at most 1 down to exactly 0")
    if not (sigmas[1:] < sigmas[:-1]).all():
        step, *row = torch.nonzero(sigmas[1:] >= sigmas[:-1])[0].tolist()
        before, after = (sigmas[(at, *row)] for at in (step, step + 1))
        raise ValueError(f"sigmas rise at step {step} ({before:g} to {after:g}), expected falling ones")


def sde_window(key: Key, T: int, size: int, lo: int = 0, hi: int | None = None) -> range:
    """Return the window of stochastic steps: `size` contiguous ones, placed uniformly within [lo, hi) of a T-step schedule.

    Args:
        key: one key of Python integers, so that the window is known without reading from a device.
        T: number of steps of the schedule.
        size: number of stochastic steps, 1 <= size <= hi - lo.
        lo, hi: range of steps that the window may cover, 0 <= lo < hi <= T; hi defaults to T.

    Source: Flow-GRPO-Fast (yifan123/flow_grpo) and MixGRPO (arXiv 2507.21802).
    """
    lo, hi = _check_range("sde_window", T, size, lo, hi)
    # Rounded to float32, so that the start is the same wherever it is computed.
    mantissa, exponent = math.frexp(host_uniforms(key, 1)[0] * (hi - lo - size + 1))
    start = lo + int(math.ldexp(round(mantissa * 2**24), exponent - 24))
    return range(start, start + size)


def sde_steps(key: Key, T: int, size: int, lo: int = 0, hi: int | None = None) -> list[int]:
    """Return `size` distinct steps to take stochastically, in order, drawn uniformly from [lo, hi) of a T-step schedule.

    Arguments and errors are as in `sde_window`, whose steps are contiguous.

    Source: Flow-Factory and UniRL, whose drawn steps need not be adjacent.
    """
    lo, hi = _check_range("sde_steps", T, size, lo, hi)
    drawn = host_uniforms(key, hi - lo)
    return sorted(sorted(range(lo, hi), key=lambda step: drawn[step - lo])[:size])


def moving_window(
    done: int,
    T: int,
    size: int,
    lo: int = 0,
    hi: int | None = None,
    *,
    every: int,
    stride: int = 1,
    repeat: bool = True,
    decay: float = 0.0,
    decay_from: int = 0,
) -> range:
    """Return the window of stochastic steps of a rollout; it moves from noise to data during training.

    The window starts at lo, lo + stride, ..., as long as it fits in [lo, hi). It stays at start s for

        ceil(every exp(-decay max(0, s - decay_from)))

    rollouts, so that with decay > 0 later steps are trained less (MixGRPO's exponential decay; 0 is "progressive").

    Args:
        done: number of completed rollouts.
        T, size, lo, hi: as in `sde_window`.
        every: number of rollouts at the first position, >= 1.
        stride: number of steps between two positions, >= 1.
        repeat: start over after the last position; otherwise the window stays there.
        decay: rate of the decay per step, >= 0.
        decay_from: window start from which the decay applies.

    Source: MixGRPO (arXiv 2507.21802), which shortens windows at the end of the range; here, as in UniRL, none is.
    """
    lo, hi = _check_range("moving_window", T, size, lo, hi)
    for name, value in (("every", every), ("stride", stride)):
        if value < 1:
            raise ValueError(f"moving_window: {name} is {value}, expected at least 1")
    starts = range(lo, hi - size + 1, stride)
    stays = [math.ceil(every * math.exp(-decay * max(0, start - decay_from))) for start in starts]
    left = done % sum(stays) if repeat else min(done, sum(stays) - 1)
    for start, stay in zip(starts, stays, strict=True):
        if left < stay:
            return range(start, start + size)
        left -= stay
    raise AssertionError("a position has at least one rollout")


def _check_range(function: str, T: int, size: int, lo: int, hi: int | None) -> tuple[int, int]:
    """Return lo and hi; raise ValueError unless `size` steps fit between them, within a schedule of T steps."""
    hi = T if hi is None else hi
    if not 0 <= lo < hi <= T:
        raise ValueError(f"{function}: steps {lo} to {hi} are not within a schedule of {T} steps")
    if not 1 <= size <= hi - lo:
        raise ValueError(f"{function}: size is {size}, expected 1 to {hi - lo} (steps {lo} to {hi})")
    return lo, hi


def _shift(s: Tensor, shift: float) -> Tensor:
    return shift * s / (1 + (shift - 1) * s)


def _make_linear(T: int) -> Tensor:
    if isinstance(T, bool) or not isinstance(T, int) or T < 1:
        raise ValueError(f"a schedule cannot have {T!r} steps, expected an integer >= 1")
    return torch.linspace(1, 0, T + 1, dtype=torch.float64)
