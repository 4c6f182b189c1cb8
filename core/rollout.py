"""Rollout: a transition folded over a schedule, recording what a policy update needs."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian, transitions
from fluvial.core.checks import FLOATING, compute_dtype
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.sigmas import check_sigmas
from fluvial.core.transitions import Sampler, Transition
from fluvial.core.types import Grid, Samples

# v = velocity(x, sigma, step): x `[B, *event]`, sigma `[B]` float32, step the index into the schedule.
Velocity = Callable[[Tensor, Tensor, int], Tensor]

# A log-prob with the arguments of `gaussian.log_prob`.
LogProb = Callable[..., Tensor]


class Debug(NamedTuple):
    """What the recorded steps were made of; each `[B, S, ...]`."""

    noise: Tensor
    mean: Tensor
    std: Tensor
    velocity: Tensor


class Trajectory(NamedTuple):
    """A batch of rollouts: S recorded steps of B samples, and the final samples."""

    x: Tensor  # [B, S, *event] before each recorded step
    x_next: Tensor  # [B, S, *event] after it
    steps: Tensor  # [S] int64, indices into the schedule
    log_prob: Tensor  # [B, S] under the policy that made the rollout
    velocity: Tensor | None  # [B, S, *event], the model's output at each recorded step, if it was asked for
    final: Tensor  # [B, *event], in the dtype of the computation
    debug: Debug | None


def rollout(
    velocity: Velocity,
    x: Samples,
    sigmas: Grid,
    *,
    transition: Sampler,
    key: Key,
    window: Collection[int] | None = None,
    deterministic: Sampler = transitions.ode,
    record: Collection[int] | None = None,
    form: Form = "density",
    reduction: Reduction = "mean",
    log_prob: LogProb = gaussian.log_prob,
    dtype: torch.dtype | None = None,
    keep_velocity: bool = False,
    debug: bool = False,
) -> Trajectory:
    """Sample x_{i+1} ~ N(a_i x_i + b_i velocity(x_i), std_i^2) along a schedule; record steps and their log-probs.

    Log-probs are computed from the tensors as stored, by the function a policy update calls, so that an on-policy
    ratio is exactly 1.

    Args:
        velocity: the model, v = velocity(x, sigma `[B]`, step).
        x: initial noise, `[B, *event]`.
        sigmas: T+1 falling noise levels, the last exactly 0 (for `ddim`: rising cumulative signal powers).
        transition: a sampler with its hyper-parameters bound, e.g. partial(flow_sde, eta=0.7, sigma_max=sigmas[1]).
        key: one key, into which each sample's place in the batch is folded, or a key a sample `[B]`. Step i draws
            from fold_in(key, i).
        window: the steps taken with `transition`, all by default.
        deterministic: the sampler of the other steps, which draws no noise; partial(ddim, eta=0) beside `ddim`.
        record: the steps to record, by default those of the window that are stochastic.
        form, reduction: of the log-probs, as in `gaussian.log_prob`.
        log_prob: what computes them: the function that the update will compare them with.
        dtype: in which the trajectory is stored, by default that of the computation. Where it is lower, each sample is
            rounded before it goes on, so that the stored trajectory is the one that was walked.
        keep_velocity: also return the model's output of the recorded steps, which some objectives compare theirs with.
        debug: also return noise, mean, std and model output of the recorded steps.

    Raises:
        ValueError: a step out of range, or a recorded step without a density (std = 0) where `form` needs one; the
            message names the sampler and the step.
    """
    T = len(sigmas) - 1
    window = range(T) if window is None else window
    if deterministic is transitions.ode and set(window) != set(range(T)):
        try:
            check_sigmas(sigmas)
        except ValueError as error:
            way_out = (
                "steps outside the window are the ODE's, over noise levels; pass deterministic=partial(ddim, eta=0) for DDIM"
            )
            raise ValueError(f"rollout: {error}: {way_out}") from error
    batch, compute = x.shape[0], compute_dtype("rollout", x=x, sigmas=sigmas)
    dtype = compute if dtype is None else dtype
    if dtype not in FLOATING:
        raise TypeError(f"rollout: dtype is {dtype}, expected a floating-point dtype")
    for name, steps in (("window", window), ("record", record or ())):
        if out := [step for step in steps if not 0 <= step < T]:
            raise ValueError(f"rollout: {name} holds steps {out}, expected 0 to {T - 1}")
    samplers = [transition if step in window else deterministic for step in range(T)]
    if record is None:
        record = [step for step in window if form == "unscaled" or not _is_deterministic(samplers[step], sigmas, step)]
        if not record and form != "unscaled":
            raise ValueError(
                f"rollout: {sampler_name(transition)} takes no stochastic step in {list(window)}, so form={form!r} has "
                "no answer: use eta > 0, or form='unscaled'"
            )
    check_density(samplers, sigmas, record=record, form=form)

    keys = key if isinstance(key.low, Tensor) else fold_in(key, torch.arange(batch, device=x.device))
    levels = sigmas.to(device=x.device, dtype=compute)
    x = x.to(dtype).to(compute)
    before, after, log_probs, outputs, details = [], [], [], [], []
    for step, sampler in enumerate(samplers):
        sigma, sigma_next = (level.expand(batch).contiguous() for level in levels[step : step + 2])
        coefficients: Transition = sampler(sigma, sigma_next)
        v = velocity(x, sigma, step)
        if step in window:
            noise = normal(fold_in(keys, step), x.shape, dtype=compute)
            x_next = gaussian.sample(coefficients, x, v, noise)
        else:
            noise = torch.zeros_like(x)
            x_next = gaussian.mean(coefficients, x, v)
        x_next = x_next.to(dtype).to(compute)
        if step in record:
            before.append(x.to(dtype))
            after.append(x_next.to(dtype))
            log_probs.append(log_prob(coefficients, x, v, x_next, form=form, reduction=reduction))
            if keep_velocity:
                outputs.append(v)
            if debug:
                details.append(Debug(noise, gaussian.mean(coefficients, x, v), coefficients.std, v))
        x = x_next

    def stack(tensors: Sequence[Tensor], *event: int, dtype: torch.dtype = compute) -> Tensor:
        return torch.stack(list(tensors), dim=1) if tensors else x.new_empty((batch, 0, *event), dtype=dtype)

    event = x.shape[1:]
    noises, means, stds, velocities = zip(*details, strict=True) if details else ((), (), (), ())
    return Trajectory(
        x=stack(before, *event, dtype=dtype),
        x_next=stack(after, *event, dtype=dtype),
        steps=torch.tensor([step for step in range(T) if step in record], dtype=torch.int64, device=x.device),
        log_prob=stack(log_probs),
        velocity=stack(outputs, *event) if keep_velocity else None,
        final=x,
        debug=Debug(stack(noises, *event), stack(means, *event), stack(stds), stack(velocities, *event)) if debug else None,
    )


def unrecorded(final: Samples) -> Trajectory:
    """Return the trajectory of samples that came about in some other way: no step of it is known."""
    batch, *event = final.shape
    nothing = final.new_empty((batch, 0, *event))
    steps = torch.empty(0, dtype=torch.int64, device=final.device)
    return Trajectory(nothing, nothing, steps, final.new_empty((batch, 0)), None, final, None)


def check_density(samplers: Sequence[Sampler], sigmas: Grid, *, record: Collection[int], form: Form) -> None:
    """Raise ValueError, naming sampler and step, if a recorded step is deterministic and `form` divides by its std.

    Call it once, when a schedule is built: it looks at values only where that is free.

    Args:
        samplers: of each step.
        sigmas: the schedule.
        record: the steps to record.
        form: of the log-prob.
    """
    if form == "unscaled":
        return
    for step in record:
        if _is_deterministic(samplers[step], sigmas, step):
            raise ValueError(
                f"{sampler_name(samplers[step])} has std 0 at step {step} (sigma {sigmas[step]:g} to {sigmas[step + 1]:g}), "
                f"so form={form!r} has no answer: use eta > 0 and record only stochastic steps, or form='unscaled'"
            )


def sampler_name(sampler: Sampler) -> str:
    """Return the name of a sampler, with or without bound hyper-parameters, for messages."""
    function = sampler.func if isinstance(sampler, partial) else sampler
    return getattr(function, "__name__", type(function).__name__)


def _is_deterministic(sampler: Sampler, sigmas: Tensor, step: int) -> bool:
    if sigmas.device.type != "cpu":
        return sampler is transitions.ode
    return not bool(sampler(sigmas[step], sigmas[step + 1]).std > 0)
