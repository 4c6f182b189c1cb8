"""Rollout: a transition folded over a schedule, recording what a policy update needs.

`rollout` has its own loop. A loop that belongs to someone else (a diffusers pipeline) records the same trajectory with the
same three functions: `plan_steps` before the first step, `record_step` at each recorded one, `stack_steps` at the end.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.checks import FLOATING, check_literals, check_part, compute_dtype, trusted_values
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in, step_keys, step_noises
from fluvial.core.sigmas import check_sigmas
from fluvial.core.transitions import Sampler, Transition, sampler_name
from fluvial.core.types import Grid, Samples

# v = velocity(x, level, step): x `[B, *event]`, level `[B]` float32, step the index into the schedule.
Velocity = Callable[[Tensor, Tensor, int], Tensor]

# A log-prob with the arguments of `gaussian.log_prob`.
LogProb = Callable[..., Tensor]
# A draw of a step and its log-prob, with the arguments of `step.sde_step`.
Draw = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Record:
    """What is recorded of a rollout's steps.

    Args:
        steps: indices of the recorded steps; None records the stochastic steps of the window.
        form, reduction: of the log-probs, as in `gaussian.log_prob`.
        log_prob: function that computes them; it should be the one that the update calls.
        draw: function that draws a recorded stochastic step and scores it at once, with the same result as `log_prob` of the
            drawn sample; None draws and scores in turn. Steps with `dtype` or `debug` do, too.
        by_key: give `draw` the step's keys instead of noise, which is then drawn inside it.
        dtype: dtype of the stored samples; None is that of the computation. If it is lower, each sample is rounded before
            the next step is taken, so that the stored trajectory is the one that was sampled.
        velocity: also record the model's output, which some objectives compare theirs with.
        debug: also record noise, mean, std and model output of each step.
    """

    steps: Collection[int] | None = None
    form: Form = "density"
    reduction: Reduction = "mean"
    log_prob: LogProb = gaussian.log_prob
    draw: Draw | None = None
    by_key: bool = False
    dtype: torch.dtype | None = None
    velocity: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        check_literals(self)
        if self.dtype not in (None, *FLOATING):
            raise TypeError(f"record.dtype is {self.dtype}, expected a floating-point dtype")


class Debug(NamedTuple):
    """What the recorded steps were computed from; each `[B, S, ...]`."""

    noise: Tensor
    mean: Tensor
    std: Tensor
    velocity: Tensor


class Trajectory(NamedTuple):
    """A batch of rollouts: S recorded steps of B samples, and the final samples."""

    x: Tensor  # [B, S, *event] before each recorded step
    x_next: Tensor  # [B, S, *event] after it
    steps: Tensor  # int64 indices into the schedule: [S], or [B, S] where each sample has steps of its own
    log_prob: Tensor  # [B, S] under the policy that made the rollout
    velocity: Tensor | None  # [B, S, *event], the model's output at each recorded step, if it is recorded
    final: Tensor  # [B, *event], in the dtype of the computation
    debug: Debug | None


class StepPlan(NamedTuple):
    """Which sampler takes each step of a schedule, and which steps are recorded."""

    samplers: tuple[Sampler, ...]  # of each step
    window: frozenset[int]
    record: frozenset[int]


class RecordedStep(NamedTuple):
    """One recorded step of B samples, each tensor `[B, ...]`."""

    x: Tensor
    x_next: Tensor
    log_prob: Tensor
    velocity: Tensor | None
    debug: Debug | None


def rollout(
    velocity: Velocity,
    x: Samples,
    sigmas: Grid,
    *,
    transition: Sampler,
    key: Key,
    window: Collection[int] | Tensor | None = None,
    deterministic: Sampler = transitions.ode,
    record: Record | Collection[int] | None = None,
    steps: range | None = None,
) -> Trajectory:
    """Sample x_{i+1} ~ N(a_i x_i + b_i velocity(x_i), std_i^2 I) along a schedule; record steps and their log-probs.

    Log-probs are computed from the tensors as stored, by the function that a policy update calls, so that an on-policy
    ratio is exactly 1.

    Args:
        velocity: the model, v = velocity(x, level `[B]`, step).
        x: initial noise, `[B, *event]`.
        sigmas: the schedule's T+1 levels: noise levels that fall to exactly 0, or for `ddim` cumulative signal powers that
            rise.
        transition: sampler with its hyper-parameters bound, e.g. `transitions.bind("flow_sde", 0.7, sigmas)`.
        key: one key, into which each sample's index in the batch is folded, or one key per sample, `[B]`. Step i draws
            its noise from fold_in(key, i).
        window: the steps taken with `transition`: indices, the same for all samples, or `[B, S]` int64 on the host, S
            rising indices of each sample; None is all of them.
        deterministic: sampler of the other steps, for which no noise is drawn; partial(ddim, eta=0) beside `ddim`.
        record: what to record, or just the indices of the steps to record; None is `Record()`. With a window per sample,
            either the steps of the window are recorded, or none.
        steps: the part of the schedule to take, contiguous; None is the whole. `x` is the sample before its first step, and
            `final` the one after its last. Two parts give the trajectory of the whole, because a step's index in the
            schedule, its noise included, does not depend on the part.

    Raises:
        ValueError: a step is out of range or of the part, or a recorded step has no density (std = 0) where the form needs
            one; the message names the sampler and the step.
    """
    record = as_record(record)
    steps = range(len(sigmas) - 1) if steps is None else steps
    own = _checked_own(window, record, len(x)) if isinstance(window, Tensor) else None
    shared = (steps if window is None else window) if own is None else own.unique().tolist()  # lies on the host
    plan = plan_steps(sigmas, transition, window=shared, deterministic=deterministic, record=record)
    check_part("rollout", steps, len(sigmas) - 1, window=plan.window, record=plan.record)
    batch, compute = x.shape[0], compute_dtype("rollout", x=x, sigmas=sigmas)
    dtype = compute if record.dtype is None else record.dtype
    keys = key if isinstance(key.low, Tensor) else fold_in(key, torch.arange(batch, device=x.device))
    levels = sigmas.to(device=x.device, dtype=compute)
    rows = levels[:, None].expand(-1, batch).contiguous().unbind(0)
    coefficients = _coefficients(plan, levels, batch)
    if own is not None:
        coefficients = _own_coefficients(own, coefficients, plan, deterministic, levels, whole=record.steps is None)
    at_once = plan.window & plan.record if record.draw and dtype == compute and not record.debug else frozenset[int]()
    by_key = at_once if record.by_key else frozenset[int]()
    noises = step_noises(keys, sorted(plan.window - by_key), x.shape, compute)
    own_keys = step_keys(keys, sorted(by_key), batch)
    x = x.to(dtype).to(compute)
    recorded: dict[int, RecordedStep] = {}
    for step in steps:
        of_step = coefficients[step]
        v = velocity(x, rows[step], step)
        if step in at_once and record.draw is not None:
            given = {"key": next(own_keys)} if step in by_key else {"noise": next(noises)}
            with trusted_values():  # `plan_steps` has looked at every std
                x_next, log_prob = record.draw(of_step, x, v, form=record.form, reduction=record.reduction, **given)
            recorded[step] = RecordedStep(x, x_next, log_prob, v if record.velocity else None, None)
            x = x_next
            continue
        noise = next(noises) if step in plan.window else None
        x_next = gaussian.mean(of_step, x, v) if noise is None else gaussian.sample(of_step, x, v, noise)
        x_next = x_next.to(dtype).to(compute)
        if step in plan.record:
            with trusted_values():  # `plan_steps` has looked at every std
                row = record_step(record, of_step, x, v, x_next, noise)
            recorded[step] = row._replace(x=x.to(dtype), x_next=x_next.to(dtype))
        x = x_next
    trajectory = stack_steps(record, recorded, final=x, dtype=dtype)
    return trajectory if own is None or not recorded else _own_steps(trajectory, own, sorted(recorded))


def _coefficients(plan: StepPlan, levels: Tensor, batch: int) -> list[Transition]:
    """Return the coefficients of every step, each `[B]` and contiguous, with one call per sampler."""
    found: dict[int, Transition] = {}
    for inside in (True, False):
        steps = [step for step in range(len(plan.samplers)) if (step in plan.window) is inside]
        if steps:
            index = torch.tensor(steps, device=levels.device)
            table = plan.samplers[steps[0]](levels[index], levels[index + 1])
            columns = (value.expand(len(steps))[:, None].expand(-1, batch).contiguous().unbind(0) for value in table)
            found.update(zip(steps, map(Transition, *columns), strict=True))
    return [found[step] for step in range(len(plan.samplers))]


def _checked_own(own: Tensor, record: Record, batch: int) -> Tensor:
    """Return a window for each of `batch` samples; raise ValueError if it is none."""
    if own.ndim != 2 or len(own) != batch or own.dtype != torch.int64 or own.device.type != "cpu":
        raise ValueError(
            f"rollout: window is {own.dtype} {list(own.shape)} on {own.device}, expected int64 [{batch}, S] on the CPU"
        )
    if not (own[:, 1:] > own[:, :-1]).all():
        raise ValueError("rollout: window has a row that does not rise, expected rising steps of each sample")
    if record.steps is not None and len(record.steps):
        raise ValueError("rollout: record.steps is set, and each sample has a window of its own: use None or ()")
    return own


def _own_coefficients(
    own: Tensor, coefficients: list[Transition], plan: StepPlan, deterministic: Sampler, levels: Tensor, *, whole: bool
) -> list[Transition]:
    """Return the coefficients of every step, those of `deterministic` for samples whose window does not hold the step.

    Raises:
        ValueError: `whole` windows are to be recorded, and a step of one cannot be.
    """
    if left_out := sorted(plan.window - plan.record) if whole else []:
        raise ValueError(
            f"rollout: window holds steps {left_out}, which are deterministic and have no density, so that samples would "
            "have different numbers of recorded steps: leave these steps out of every window"
        )
    found = list(coefficients)
    for step in plan.window:
        holds = (own == step).any(dim=1).to(levels.device)
        other = deterministic(levels[step].expand(len(own)), levels[step + 1].expand(len(own)))
        found[step] = Transition(*(torch.where(holds, a, b) for a, b in zip(coefficients[step], other, strict=True)))
    return found


def _own_steps(trajectory: Trajectory, own: Tensor, steps: Sequence[int]) -> Trajectory:
    """Return the recorded steps of each sample's own window, out of `steps`, those that any window holds."""
    place = torch.searchsorted(torch.tensor(steps), own).to(trajectory.steps.device)

    def chosen(table: Tensor) -> Tensor:
        index = place.reshape(*place.shape, *[1] * (table.ndim - 2))
        return torch.take_along_dim(table, index, dim=1)

    debug, velocity = trajectory.debug, trajectory.velocity
    return Trajectory(
        chosen(trajectory.x), chosen(trajectory.x_next), own.to(trajectory.steps.device), chosen(trajectory.log_prob),
        None if velocity is None else chosen(velocity), trajectory.final,
        None if debug is None else Debug(*(chosen(table) for table in debug)),
    )  # fmt: skip


def unrecorded(final: Samples) -> Trajectory:
    """Return the trajectory of samples that were made in some other way, with no recorded step."""
    return stack_steps(Record(), {}, final=final, dtype=final.dtype)


def as_record(record: Record | Collection[int] | None) -> Record:
    """Return what to record from the short forms that `rollout` accepts: the steps alone, or None."""
    return record if isinstance(record, Record) else Record(steps=record)


def plan_steps(
    levels: Grid,
    transition: Sampler,
    *,
    window: Collection[int] | None = None,
    deterministic: Sampler = transitions.ode,
    record: Record | None = None,
    function: str = "rollout",
) -> StepPlan:
    """Return which sampler takes each step of a schedule and which steps are recorded, after checking that it can be done.

    Call it once per schedule, with levels on the host: it reads values only where that is free.

    Args:
        levels: T+1 levels.
        transition, window, deterministic, record: as in `rollout`.
        function: name of the caller, for messages.

    Raises:
        ValueError: as in `rollout`.
    """
    record, T = record or Record(), len(levels) - 1
    window = range(T) if window is None else window
    if deterministic is transitions.ode and set(window) != set(range(T)):
        try:
            check_sigmas(levels)
        except ValueError as error:
            raise ValueError(
                f"{function}: {error}: steps outside the window are the ODE's, over noise levels; pass "
                "deterministic=partial(ddim, eta=0) for DDIM"
            ) from error
    for name, chosen in (("window", window), ("record", record.steps or ())):
        if out := [step for step in chosen if not 0 <= step < T]:
            raise ValueError(f"{function}: {name} holds steps {out}, expected 0 to {T - 1}")
    samplers = tuple(transition if step in window else deterministic for step in range(T))
    steps = record.steps
    if steps is None:
        without = frozenset() if record.form == "unscaled" else _deterministic_steps(samplers, levels, window)
        steps = [step for step in window if step not in without]
        if not steps and record.form != "unscaled":
            raise ValueError(
                f"{function}: {sampler_name(transition)} takes no stochastic step in {list(window)}, so "
                f"form={record.form!r} has no answer: use a stochastic sampler with eta > 0, or form='unscaled'"
            )
    else:
        check_density(samplers, levels, record=steps, form=record.form)
    return StepPlan(samplers, frozenset(window), frozenset(steps))


def record_step(
    record: Record, transition: Transition, x: Samples, v: Samples, x_next: Samples, noise: Samples | None
) -> RecordedStep:
    """Return what is recorded of one step.

    Args:
        record: what to record.
        transition: coefficients of the step, `[B]`.
        x, v, x_next: sample, model output and next sample, `[B, *event]`, the samples rounded as they are stored.
        noise: the noise that was drawn, `[B, *event]`; None stands for zeros.
    """
    debug = None
    if record.debug:
        noise = transition.std.new_zeros(x.shape) if noise is None else noise
        debug = Debug(noise, gaussian.mean(transition, x, v), transition.std, v)
    log_prob = record.log_prob(transition, x, v, x_next, form=record.form, reduction=record.reduction)
    return RecordedStep(x, x_next, log_prob, v if record.velocity else None, debug)


def stack_steps(record: Record, steps: Mapping[int, RecordedStep], *, final: Samples, dtype: torch.dtype) -> Trajectory:
    """Return the trajectory of recorded steps.

    Args:
        record: what was recorded.
        steps: the recorded steps by their index into the schedule.
        final: the samples after the last step of the schedule, `[B, *event]`.
        dtype: dtype of the trajectory's samples. A step that was recorded in a wider dtype is not rounded: all steps are
            then stored in the wider one.
    """
    compute, (batch, *event) = compute_dtype("trajectory", final=final), final.shape
    indices = sorted(steps)
    rows = [steps[index] for index in indices]

    def stack(tensors: Sequence[Tensor], *event: int, least: torch.dtype | None = None) -> Tensor:
        if not tensors:
            return final.new_empty((batch, 0, *event), dtype=least or compute)
        dtypes = {tensor.dtype for tensor in tensors}
        common = reduce(torch.promote_types, dtypes, least or tensors[0].dtype) if dtypes != {least} else least
        return torch.stack([tensor.to(common) for tensor in tensors], dim=1)

    debugs = [row.debug for row in rows if row.debug is not None]
    debug = Debug(
        noise=stack([row.noise for row in debugs], *event),
        mean=stack([row.mean for row in debugs], *event),
        std=stack([row.std for row in debugs]),
        velocity=stack([row.velocity for row in debugs], *event),
    )
    return Trajectory(
        x=stack([row.x for row in rows], *event, least=dtype),
        x_next=stack([row.x_next for row in rows], *event, least=dtype),
        steps=torch.tensor(indices, dtype=torch.int64, device=final.device),
        log_prob=stack([row.log_prob for row in rows]),
        velocity=stack([row.velocity for row in rows if row.velocity is not None], *event) if record.velocity else None,
        final=final.to(compute),
        debug=debug if record.debug else None,
    )


def check_density(samplers: Sequence[Sampler], levels: Grid, *, record: Collection[int], form: Form) -> None:
    """Raise ValueError, naming sampler and step, if a recorded step is deterministic and `form` divides by its std.

    Call it once per schedule: it reads values only where that is free.

    Args:
        samplers: sampler of each step.
        levels: T+1 levels.
        record: the steps to record.
        form: form of the log-prob.
    """
    if form == "unscaled":
        return
    without = _deterministic_steps(samplers, levels, record)
    for step in record:
        if step in without:
            raise ValueError(
                f"{sampler_name(samplers[step])} has std 0 at step {step} (level {levels[step]:g} to {levels[step + 1]:g}), "
                f"so form={form!r} has no answer: use eta > 0 and record only stochastic steps, or form='unscaled'"
            )


def _deterministic_steps(samplers: Sequence[Sampler], levels: Tensor, steps: Collection[int]) -> frozenset[int]:
    """Return those of the steps whose std is not positive. Values are read once per sampler, and only on the CPU."""
    found: set[int] = set()
    by_sampler: dict[int, list[int]] = {}
    for step in steps:
        by_sampler.setdefault(id(samplers[step]), []).append(step)
    for same in by_sampler.values():
        sampler = samplers[same[0]]
        if levels.device.type != "cpu":
            found.update(same if sampler is transitions.ode else ())
            continue
        index = torch.tensor(same)
        positive = (sampler(levels[index], levels[index + 1]).std > 0).expand(len(same)).tolist()
        found.update(step for step, stochastic in zip(same, positive, strict=True) if not stochastic)
    return frozenset(found)
