"""A schedule and its window as one table: the `Transition` of every step and sample, each coefficient `[T, B]`.

It is `[T, B, R]` with a noise level per block of samples `[B, R, ...]`.

Steps in a sample's window have the coefficients of the stochastic sampler, all others those of the deterministic one. The
stochastic and the recorded steps of each sample are known on the host.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core import transitions
from fluvial.core.checks import FLOATING, can_look, check_fields, first_block, per_sample
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.sigmas import check_sigmas
from fluvial.core.transitions import Sampler, Transition, sampler_name
from fluvial.core.types import Grid, to_device

Rows = tuple[tuple[int, ...], ...]  # steps of each sample, in order; a single row if all samples share them


@dataclass(frozen=True)
class Record:
    """Recording options of a rollout.

    Args:
        steps: indices of the recorded steps; None records the steps of the window that have a density.
        form, reduction: form and reduction of the log-probs, as in `gaussian.log_prob`.
        dtype: dtype of the stored samples; None is the compute dtype. If it is lower, each sample is rounded before the next
            step, so that the stored trajectory is the one that was sampled.
        velocity: also record the model output, which some objectives compare with.
        debug: also record noise, mean, std and model output of each step.
    """

    steps: Collection[int] | None = None
    form: Form = "density"
    reduction: Reduction = "mean"
    dtype: torch.dtype | None = None
    velocity: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # type hints cannot be traced
            check_fields(self)
        if self.dtype not in (None, *FLOATING):
            raise TypeError(f"record.dtype is {self.dtype}, expected a floating-point dtype")


RECORD = Record()


class StepPlan(NamedTuple):
    """The steps of a rollout of B samples, known before the first one is taken."""

    levels: Tensor  # [T+1], or [T+1, R] with a level per row, on the device of the table
    table: Transition  # each coefficient [T, B], or [T, B, R]
    stochastic: Rows  # steps of each sample's window, which draw noise
    recorded: Rows  # recorded steps, equally many per sample
    steps: range  # part of the schedule to run
    record: Record

    def transition(self, step: int) -> Transition:
        """Return the coefficients of a step, each `[B]` or `[B, R]`."""
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
) -> StepPlan:
    """Return the table of a schedule and a window, after checking that every recorded step has a density.

    Values are read on the host only, so pass levels on the CPU. If the values of levels or eta are not known (accelerator,
    compilation, tracing), the caller must ensure that every step of the window has a density, or name the recorded steps.

    Args:
        levels: T+1 levels, `[T+1]`, or per row of the samples, `[T+1, R]`.
        transition, window, deterministic, record, steps: as in `rollout`.
        batch: number of samples B.
        device: device of the table; by default the device of the levels.
        function: name of the caller, for messages.

    Raises:
        ValueError: as in `rollout`.
    """
    T, chosen = len(levels) - 1, record
    record = record if isinstance(record, Record) else RECORD
    chosen = chosen.steps if isinstance(chosen, Record) else chosen
    taken = range(T) if steps is None else steps
    if taken.step != 1 or not 0 <= taken.start <= taken.stop <= T:
        raise ValueError(f"{function}: steps is {steps}, expected a contiguous range within 0 to {T}")
    stochastic = _list_rows(f"{function}: window", taken if window is None else window, batch, taken)
    if deterministic is transitions.ode and any(len(row) < len(taken) for row in stochastic):
        _check_ode(function, levels)
    coefficients = _list_coefficients(transition, levels)
    dense = range(T) if record.form == "unscaled" else _find_dense_steps(transition, coefficients.std)
    if chosen is None:
        recorded = tuple(tuple(step for step in row if step in dense) for row in stochastic)
        _check_window(function, stochastic, recorded, transition, record.form, is_named=isinstance(window, Tensor))
    else:
        recorded = _list_rows(f"{function}: record", chosen, batch, taken)
        if record.form != "unscaled":
            _check_recorded(function, levels, stochastic, recorded, dense, (transition, deterministic), record.form)
    if device is not None and device != levels.device:
        levels = to_device(levels, device)
        coefficients = _list_coefficients(transition, levels)
    if any(len(row) < T for row in stochastic):
        outside = _list_coefficients(deterministic, levels)
        inside = per_sample(mask(stochastic, T, levels.device), coefficients.std)
        coefficients = Transition(*(torch.where(inside, a, b) for a, b in zip(coefficients, outside, strict=True)))
    shape = -1, batch, *levels.shape[1:]
    table = Transition(*(coefficient.expand(*shape).contiguous() for coefficient in coefficients))
    return StepPlan(levels, table, stochastic, recorded, taken, record)


def mask(rows: Rows, T: int, device: torch.device) -> Tensor:
    """Return whether each step is among a sample's steps, bool `[T, B]`, or `[T, 1]` if all samples share them."""
    return to_device(torch.tensor([[step in row for row in map(set, rows)] for step in range(T)]), device)


def _list_rows(name: str, chosen: Collection[int] | Tensor, batch: int, taken: range) -> Rows:
    """Return the chosen steps as rows: a single row for all samples, or one per sample."""
    if isinstance(chosen, Tensor):
        if chosen.ndim != 2 or len(chosen) != batch or chosen.dtype != torch.int64 or chosen.device.type != "cpu":
            raise ValueError(
                f"{name} is {chosen.dtype} {list(chosen.shape)} on {chosen.device}, expected int64 [{batch}, S] on the CPU"
            )
        if torch.compiler.is_compiling():
            raise ValueError(f"{name} is a tensor, whose values no graph knows: call `plan` outside, and `scan` its table")
        rows: Rows = tuple(map(tuple, chosen.tolist()))
        if any(step >= following for row in rows for step, following in pairwise(row)):
            raise ValueError(f"{name} has a row that does not rise, expected rising steps of each sample")
    else:
        rows = (tuple(sorted(set(chosen))),)
    if out := sorted({step for row in rows for step in row if step not in taken}):
        raise ValueError(f"{name} holds steps {out}, expected {taken.start} to {taken.stop - 1}, the steps taken")
    return rows


def step_coefficients(sampler: Sampler, levels: Grid) -> Transition:
    """Return the coefficients of every step of a schedule, each `[T]`, or `[T, R]` with a level per row."""
    return Transition(*(value.expand(levels[1:].shape) for value in sampler(levels[:-1], levels[1:])))


def _list_coefficients(sampler: Sampler, levels: Tensor) -> Transition:
    """Return `step_coefficients` that broadcast over samples, `[T, 1]`; `[T, B]` if a hyper-parameter is per sample."""
    bound = sampler.keywords.values() if isinstance(sampler, partial) else ()
    if levels.ndim == 1 and any(isinstance(value, Tensor) and value.ndim > 0 for value in bound):
        steps = [sampler(*pair) for pair in pairwise(levels.unbind(0))]
        return Transition(*(torch.stack(parts) for parts in zip(*steps, strict=True)))
    return Transition(*(value[:, None] for value in step_coefficients(sampler, levels)))


def _find_dense_steps(sampler: Sampler, std: Tensor) -> Collection[int]:
    """Return the steps whose std is positive; if std is not known, those where it may be."""
    if not can_look(std):
        return () if sampler is transitions.ode else range(len(std))
    return {step for step, positive in enumerate((std > 0).flatten(1).all(1).tolist()) if positive}


def _check_recorded(
    function: str,
    levels: Tensor,
    stochastic: Rows,
    recorded: Rows,
    dense: Collection[int],
    samplers: tuple[Sampler, Sampler],
    form: Form,
) -> None:
    """Raise ValueError unless every recorded step is in the sample's window and has a density."""
    batch = max(len(stochastic), len(recorded))
    pairs = zip(*(rows * batch if len(rows) == 1 else rows for rows in (stochastic, recorded)), strict=True)
    for step in sorted({step for window, row in pairs for step in row if not (step in window and step in dense)})[:1]:
        sampler = samplers[0] if all(step in row for row in stochastic) else samplers[1]
        first = first_block(levels)
        where = f" (level {first[step]:g} to {first[step + 1]:g})" if can_look(levels) else ""
        raise ValueError(
            f"{function}: {sampler_name(sampler)} has std 0 at step {step}{where}, so form={form!r} is undefined: use eta > "
            "0 and record only stochastic steps, or form='unscaled'"
        )


def _check_window(
    function: str, stochastic: Rows, recorded: Rows, transition: Sampler, form: Form, *, is_named: bool
) -> None:
    """Raise ValueError unless all samples record the same number of steps of their windows, at least one."""
    window = sorted({step for row in stochastic for step in row})
    if is_named and (left_out := [step for step in window if not any(step in row for row in recorded)]):
        raise ValueError(
            f"{function}: window holds steps {left_out}, which are deterministic and have no density, so that samples would "
            "have different numbers of recorded steps: leave these steps out of every window"
        )
    if form != "unscaled" and not any(recorded):
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
