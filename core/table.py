"""A schedule and its window as one table: the `Transition` of every step and sample, each coefficient `[T, B]`.

A step in a sample's window has the coefficients of the stochastic sampler, any other step those of the deterministic one.
Which steps take noise and which are recorded are two masks over the same table. They lie on the host, as numpy arrays
`[T, B]`, or `[T, 1]` where all samples have the same steps.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.checks import FLOATING, check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.sigmas import check_sigmas
from fluvial.core.transitions import Sampler, Transition, sampler_name
from fluvial.core.types import Grid, to_device

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Record:
    """Recording options of a rollout.

    Args:
        steps: indices of the recorded steps; None records the steps of the window that have a density.
        form, reduction: of the log-probs, as in `gaussian.log_prob`.
        dtype: dtype of the stored samples; None is that of the computation. If it is lower, each sample is rounded before
            the next step is taken, so that the stored trajectory is the one that was sampled.
        velocity: also record the model's output, which some objectives compare theirs with.
        debug: also record noise, mean, std and model output of each step.
    """

    steps: Collection[int] | None = None
    form: Form = "density"
    reduction: Reduction = "mean"
    dtype: torch.dtype | None = None
    velocity: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in (None, *FLOATING):
            raise TypeError(f"record.dtype is {self.dtype}, expected a floating-point dtype")


class Plan(NamedTuple):
    """The steps of a rollout of B samples, known before the first one is taken."""

    levels: Tensor  # [T+1], on the device of the table
    table: Transition  # each coefficient [T, B]
    stochastic: Mask  # the steps of each sample's window, which take noise
    recorded: Mask  # the recorded steps, equally many of each sample
    steps: range  # the part of the schedule that is taken
    record: Record

    def transition(self, step: int) -> Transition:
        """Return the coefficients of a step, each `[B]`."""
        return Transition(*(coefficient[step] for coefficient in self.table))


def plan(
    levels: Grid,
    transition: Sampler,
    *,
    batch: int,
    window: Collection[int] | Tensor | None = None,
    deterministic: Sampler = transitions.ode,
    record: Record | Collection[int] | None = None,
    steps: range | None = None,
    device: torch.device | None = None,
    function: str = "rollout",
) -> Plan:
    """Return the table of a schedule and a window, after checking that every recorded step has a density.

    It reads values on the host only, so give it levels on the CPU.

    Args:
        levels: T+1 levels.
        transition, window, deterministic, record, steps: as in `rollout`.
        batch: number of samples B.
        device: device of the table; by default that of the levels.
        function: name of the caller, for messages.

    Raises:
        ValueError: as in `rollout`.
    """
    T, record = len(levels) - 1, record if isinstance(record, Record) else Record(steps=record)
    taken = range(T) if steps is None else steps
    if taken.step != 1 or not 0 <= taken.start <= taken.stop <= T:
        raise ValueError(f"{function}: steps is {steps}, expected a contiguous range within 0 to {T}")
    stochastic = _mask(f"{function}: window", taken if window is None else window, T, batch, taken)
    if deterministic is transitions.ode and not stochastic[taken].all():
        _check_ode(function, levels)
    coefficients = _coefficients(transition, levels)
    dense = stochastic & _positive(transition, coefficients.std)[:, None]
    if record.form == "unscaled":
        dense = np.ones_like(stochastic)
    if record.steps is None:
        recorded = stochastic & dense
        _check_window(function, stochastic, recorded, transition, record.form, own=isinstance(window, Tensor))
    else:
        recorded = _mask(f"{function}: record", record.steps, T, batch, taken)
        for step in np.flatnonzero((recorded & ~dense).any(1))[:1]:
            sampler = transition if stochastic[step].all() else deterministic
            raise ValueError(
                f"{function}: {sampler_name(sampler)} has std 0 at step {step} (level {levels[step]:g} to "
                f"{levels[step + 1]:g}), so form={record.form!r} is undefined: use eta > 0 and record only stochastic "
                "steps, or form='unscaled'"
            )
    if device is not None and device != levels.device:
        levels = to_device(levels, device)
        coefficients = _coefficients(transition, levels)
    if not stochastic.all():
        outside = _coefficients(deterministic, levels)
        inside = to_device(torch.from_numpy(stochastic), levels.device)
        coefficients = Transition(*(torch.where(inside, a, b) for a, b in zip(coefficients, outside, strict=True)))
    table = Transition(*(coefficient.expand(-1, batch).contiguous() for coefficient in coefficients))
    return Plan(levels, table, stochastic, recorded, taken, record)


def _mask(name: str, chosen: Collection[int] | Tensor, T: int, batch: int, taken: range) -> Mask:
    """Return the chosen steps as a mask: `[T, 1]` of indices for all samples, `[T, B]` of those of each sample, `[B, S]`."""
    if isinstance(chosen, Tensor):
        if chosen.ndim != 2 or len(chosen) != batch or chosen.dtype != torch.int64 or chosen.device.type != "cpu":
            raise ValueError(
                f"{name} is {chosen.dtype} {list(chosen.shape)} on {chosen.device}, expected int64 [{batch}, S] on the CPU"
            )
        index = chosen.numpy()
        if not (index[:, 1:] > index[:, :-1]).all():
            raise ValueError(f"{name} has a row that does not rise, expected rising steps of each sample")
    else:
        index = np.array([sorted(chosen)], dtype=np.int64)
    if out := sorted({int(step) for step in index.flat if step not in taken}):
        raise ValueError(f"{name} holds steps {out}, expected {taken.start} to {taken.stop - 1}, the steps taken")
    mask = np.zeros((T, len(index)), dtype=bool)
    np.put_along_axis(mask, index.T, True, axis=0)
    return mask


def _coefficients(sampler: Sampler, levels: Tensor) -> Transition:
    """Return the coefficients of every step, each `[T, 1]`, with one call."""
    found = sampler(levels[:-1], levels[1:])
    return Transition(*(value.expand(len(levels) - 1)[:, None] for value in found))


def _positive(sampler: Sampler, std: Tensor) -> Mask:
    """Return whether std is positive at each step, `[T]`; on an accelerator, which is not read, whether it may be."""
    if std.device.type != "cpu":
        return np.full(len(std), sampler is not transitions.ode)
    return (std[:, 0] > 0).numpy()


def _check_window(function: str, stochastic: Mask, recorded: Mask, transition: Sampler, form: Form, *, own: bool) -> None:
    """Raise ValueError unless the recorded part of the window has as many steps for every sample, and at least one."""
    if own and (left_out := np.flatnonzero((stochastic & ~recorded).any(1)).tolist()):
        raise ValueError(
            f"{function}: window holds steps {left_out}, which are deterministic and have no density, so that samples would "
            "have different numbers of recorded steps: leave these steps out of every window"
        )
    if form != "unscaled" and not recorded.any():
        window = np.flatnonzero(stochastic.any(1)).tolist()
        raise ValueError(
            f"{function}: {sampler_name(transition)} takes no stochastic step in {window}, so form={form!r} is undefined: "
            "use a stochastic sampler with eta > 0, or form='unscaled'"
        )


def _check_ode(function: str, levels: Tensor) -> None:
    """Raise ValueError unless the ODE, which takes steps outside the window, can step through the levels."""
    try:
        check_sigmas(levels)
    except ValueError as error:
        raise ValueError(
            f"{function}: {error}: steps outside the window are the ODE's, over noise levels; pass "
            "deterministic=partial(ddim, eta=0) for DDIM"
        ) from error
