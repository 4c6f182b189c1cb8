"""Rollout: a scan of the Gaussian step over a table of transitions, with noise z ~ N(0, I) from the key:

    v_t = velocity(x_t, level_t, t)
    x_{t+1} = a_t x_t + b_t v_t + std_t z_t        t = 0 .. T-1

`plan` builds the table from schedule and window, once, on the host. `scan` runs over it and stacks the recorded steps: x_t,
x_{t+1} and the log-probability. An external loop, such as a diffusers pipeline, yields `Step`s of the same plan, and `stack`
builds the same trajectory from them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.checks import compute_dtype, per_sample
from fluvial.core.random import Key, sample_keys, step_keys, step_noises
from fluvial.core.table import Record, StepPlan, mask, plan
from fluvial.core.transitions import Sampler, Transition
from fluvial.core.types import Grid, Samples, to_device

# v = velocity(x, level, step): x `[B, *event]`, level `[B]` or `[B, R]` float32, step the index into the schedule.
Velocity = Callable[[Tensor, Tensor, int], Tensor]
# Draws a step from its keys and scores it, `(transition, x, v, key) -> (x_next, log_prob)`, as `step.sde_step` does.
DrawAndScore = Callable[[Transition, Tensor, Tensor, Key], tuple[Tensor, Tensor]]


class Debug(NamedTuple):
    """Inputs of the recorded steps; each `[B, S, ...]`."""

    noise: Tensor
    mean: Tensor
    std: Tensor
    velocity: Tensor


class Trajectory(NamedTuple):
    """A batch of rollouts: S recorded steps of B samples, and the final samples."""

    x: Tensor  # [B, S, *event] before each recorded step
    x_next: Tensor  # [B, S, *event] after it
    steps: Tensor  # [B, S] int64 indices into the schedule
    log_prob: Tensor  # [B, S] under the policy that generated the rollout
    velocity: Tensor | None  # [B, S, *event], the model output at each recorded step, if recorded
    final: Tensor  # [B, *event], in the compute dtype; [B, 0] if not needed
    debug: Debug | None


class Step(NamedTuple):
    """One step of B samples, each tensor `[B, ...]`."""

    t: int  # index into the schedule
    x: Tensor
    v: Tensor
    x_next: Tensor
    log_prob: Tensor | None  # None for a step that is not recorded
    noise: Tensor | None = None  # None if none was drawn, or a kernel drew it


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
    """Sample x_{t+1} ~ N(a_t x_t + b_t velocity(x_t), std_t^2 I) along a schedule; record steps and their log-probs.

    Log-probs are computed from the tensors as stored, by the function that a policy update calls, so that an on-policy
    ratio is exactly 1.

    Args:
        velocity: the model, v = velocity(x, level, step), level `[B]`, or `[B, R]` with a level per block.
        x: initial noise, `[B, *event]`.
        sigmas: the schedule's T+1 levels, `[T+1]`, or per block of samples `[B, R, ...]`, `[T+1, R]`: noise levels
            that fall to exactly 0, or for `ddim` cumulative signal powers that rise.
        transition: sampler with its hyper-parameters bound, e.g. `transitions.bind("flow_sde", 0.7, sigmas)`.
        key: one key, into which each sample's index in the batch is folded, or one key per sample, `[B]`. Step t draws
            its noise from fold_in(key, t).
        window: steps taken with `transition`: indices shared by all samples, or `[B, S]` int64 on the host, S rising
            indices per sample; None is all steps.
        deterministic: sampler of the other steps, for which no noise is drawn; partial(ddim, eta=0) beside `ddim`.
        record: a `Record`, or the indices of the steps to record; None is `Record()`.
        steps: contiguous part of the schedule to run; None runs all of it. `x` is the sample before its first step, and
            `final` the one after its last. Two consecutive parts give the same trajectory as one run, because a step's
            index, and so its noise, does not depend on the part.

    Raises:
        ValueError: a step is outside the schedule or the part, or a recorded step has no density (std = 0) but the form
            needs one; the message names the sampler and the step.
    """
    levels = sigmas.to(compute_dtype("rollout", x=x, sigmas=sigmas))
    planned = plan(
        levels,
        transition,
        batch=len(x),
        window=window,
        deterministic=deterministic,
        record=record,
        steps=steps,
        device=x.device,
    )
    return scan(velocity, x, planned, key)


def scan(velocity: Velocity, x: Samples, plan: StepPlan, key: Key, *, draw: DrawAndScore | None = None) -> Trajectory:
    """Return the trajectory of a plan; the arguments are those of `unroll`."""
    return stack(plan, unroll(velocity, x, plan, key, draw=draw), x)


def unroll(velocity: Velocity, x: Samples, plan: StepPlan, key: Key, *, draw: DrawAndScore | None = None) -> Iterator[Step]:
    """Yield the steps of a plan, recorded or not.

    Args:
        velocity, x, key: as in `rollout`.
        plan: the table.
        draw: fused kernel for the recorded stochastic steps. None uses `core.gaussian` and draws the noise of many steps per
            call, as do steps that are stored in a lower dtype or with `debug` in any case.
    """
    record, batch, compute = plan.record, len(x), compute_dtype("rollout", x=x, levels=plan.levels)
    stored = compute if record.dtype is None else record.dtype
    keys = sample_keys(key, batch, device=x.device)
    levels = plan.levels.to(compute)[:, None].expand(-1, batch, *plan.levels.shape[1:]).contiguous().unbind(0)
    table = [Transition(*row) for row in zip(*(coefficient.unbind(0) for coefficient in plan.table), strict=True)]
    stochastic, recorded = ({step for row in rows for step in row} for rows in (plan.stochastic, plan.recorded))
    scored = table
    if any(len(row) < len(recorded) for row in plan.recorded) and record.form != "unscaled":
        # A step is scored for the full batch; a std of 0 in samples that do not record it would make gradients NaN.
        inside = per_sample(mask(plan.recorded, len(table), x.device), plan.table.std)
        stds = torch.where(inside, plan.table.std, 1.0).unbind(0)
        scored = [step._replace(std=std) for step, std in zip(table, stds, strict=True)]
    by_kernel = draw is not None and stored == compute and not record.debug
    fused = [t for t in plan.steps if by_kernel and t in stochastic and t in recorded]
    fused_keys = step_keys(keys, fused, batch)
    noises = step_noises(keys, [t for t in plan.steps if t in stochastic and t not in fused], tuple(x.shape), compute)
    x = x.to(stored).to(compute)
    for t in plan.steps:
        v, noise, log_prob = velocity(x, levels[t], t), None, None
        if t in fused and draw is not None:
            x_next, log_prob = draw(table[t], x, v, next(fused_keys))
        else:
            noise = next(noises) if t in stochastic else None
            x_next = gaussian.sample(table[t], x, v, noise).to(stored).to(compute)
            if t in recorded:
                log_prob = gaussian.log_prob(scored[t], x, v, x_next, form=record.form, reduction=record.reduction)
        yield Step(t, x, v, x_next, log_prob, noise)
        x = x_next


def stack(plan: StepPlan, steps: Iterable[Step], x: Samples) -> Trajectory:
    """Stack steps into a trajectory.

    Args:
        plan: the table.
        steps: steps in order; those with a log-prob are recorded. Steps of the plan may be missing.
        x: the samples before the first step, `[B, *event]`.
    """
    record = plan.record
    index: list[int] = []
    before: list[Tensor] = []
    after: list[Tensor] = []
    log_probs: list[Tensor] = []
    velocities: list[Tensor] = []
    noises: list[Tensor] = []
    for step in steps:
        x = step.x_next
        if step.log_prob is not None:
            index.append(step.t)
            before.append(step.x)
            after.append(step.x_next)
            log_probs.append(step.log_prob)
            if record.velocity or record.debug:
                velocities.append(step.v)
            if record.debug:
                noises.append(torch.zeros_like(step.x) if step.noise is None else step.noise)
    (batch, *event), compute = x.shape, compute_dtype("trajectory", final=x)
    positions, sample_steps = [[j for j, t in enumerate(index) if t in row] for row in map(set, plan.recorded)], None
    if any(len(row) < len(index) for row in positions):  # windows differ: pick each sample's steps
        sample_steps = to_device(torch.tensor(positions, dtype=torch.int64), x.device)

    def stack_recorded(tensors: Sequence[Tensor], *event: int, dtype: torch.dtype | None = None) -> Tensor:
        if not tensors:
            return x.new_empty((batch, 0, *event), dtype=dtype or compute)
        table = torch.stack([tensor.to(dtype or tensor.dtype) for tensor in tensors], dim=1)
        if sample_steps is None:
            return table
        return torch.take_along_dim(table, sample_steps.reshape(*sample_steps.shape, *[1] * len(event)), dim=1)

    debug = None
    if record.debug:
        coefficients = [plan.transition(t) for t in index]
        means = [gaussian.mean(*parts) for parts in zip(coefficients, before, velocities, strict=True)]
        debug = Debug(
            stack_recorded(noises, *event),
            stack_recorded(means, *event),
            stack_recorded([step.std for step in coefficients], *plan.levels.shape[1:]),
            stack_recorded(velocities, *event),
        )
    stored = record.dtype or (None if before else x.dtype)
    taken = to_device(torch.tensor(index, dtype=torch.int64), x.device)
    return Trajectory(
        x=stack_recorded(before, *event, dtype=stored),
        x_next=stack_recorded(after, *event, dtype=stored),
        steps=taken.repeat(batch, 1) if sample_steps is None else taken[sample_steps],
        log_prob=stack_recorded(log_probs),
        velocity=stack_recorded(velocities, *event) if record.velocity else None,
        final=x.to(compute),
        debug=debug,
    )


def wrap_samples(final: Samples) -> Trajectory:
    """Return a trajectory without recorded steps for samples that were generated in another way."""
    none = final.new_empty((len(final), 0, *final.shape[1:]))
    steps = torch.empty((len(final), 0), dtype=torch.int64, device=final.device)
    compute = final.to(compute_dtype("trajectory", final=final))
    return Trajectory(none, none, steps, compute.new_empty((len(final), 0)), None, compute, None)
