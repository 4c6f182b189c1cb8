"""Steps of a rollout: the items of objectives that compare them, or follow the gradient of a reward through them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition
from fluvial.engines.sampling.items.share import Share
from fluvial.engines.streams import Stream
from fluvial.models import Schedule, host_values
from fluvial.models.host_values import to_device


class RecordedSteps(NamedTuple):
    """P recorded steps, each field `[P, ...]`."""

    x: Tensor  # sample at which the model is evaluated
    level: Tensor  # its noise level: sigma of a flow, alpha_bar of an epsilon-prediction model
    timestep: Tensor  # timestep that the model is given
    sample: Tensor  # int64, row of the conditioning; the items of one sample share it
    signal: Tensor  # number of the sample, or of the step, that the method gave, e.g. its advantage
    weight: Tensor  # weight in the loss: 1, or 0 for items that only fill up
    level_next: Tensor
    x_next: Tensor
    log_prob_old: Tensor
    transition: Transition  # coefficients of each step
    predictions: dict[str, Tensor]  # of other policies at x, by name: old, ref, teacher, ema; uncond with guidance
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat
    context: Tensor | None = None  # what the method looked up of the other items
    guidance: Tensor | None = None  # guidance scale, of a loss that combines the halves (`Run.update(split_guidance=True)`)

    @property
    def dt(self) -> Tensor:
        """Change of the noise level over the step."""
        return self.level_next - self.level

    def parts(self, levels: Tensor) -> Tensor:
        """Return the step of the schedule that each item belongs to, bool `[P, T]`, given its `[T+1]` levels."""
        return at_step(self.level, levels)


class LastSteps(NamedTuple):
    """P samples before the last K steps of their rollout, each field `[P, ...]`."""

    x: Tensor  # sample at which the model is evaluated
    level: Tensor  # its noise level
    timestep: Tensor  # timestep that the model is given
    sample: Tensor  # int64, row of the conditioning
    weight: Tensor  # weight in the loss: 1, or 0 for items that only fill up
    noise: Tensor  # [P, K, *event], noise of the last K steps
    predictions: dict[str, Tensor]  # of other policies at x, by name: old, ref, teacher, ema
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat

    def parts(self, levels: Tensor) -> Tensor:
        """Return the step of the schedule that each item belongs to, bool `[P, T]`, given its `[T+1]` levels."""
        return at_step(self.level, levels)


def at_step(level: Tensor, levels: Tensor) -> Tensor:
    """Return which of a schedule's steps begins at each level, bool `[P, T]`."""
    return level[:, None] == to_device(levels[:-1], level.device)


def recorded_steps(
    trajectory: Trajectory, schedule: Schedule, transitions: Transition, signal: Tensor, weight: Tensor
) -> RecordedSteps:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    The fields of the trajectory are not copied.

    Args:
        trajectory: B samples with S recorded steps.
        schedule: schedule of the trajectory.
        transitions: coefficients of each step of the schedule, `[T]`.
        signal: number of each sample that the method gave, `[B]`, or of each step, `[B, S]`.
        weight: weight in the loss, `[B]`.
    """
    batch, count = trajectory.log_prob.shape
    device = signal.device
    levels, timesteps = to_device(schedule.levels, device), to_device(schedule.timesteps, device)
    step = host_values.keep(lambda steps: steps.T.flatten(), trajectory.steps)
    return RecordedSteps(
        x=by_step(trajectory.x),
        level=levels[step],
        timestep=host_values.rows(timesteps, step),
        sample=to_device(torch.arange(batch).repeat(count), device),
        signal=by_step(signal.reshape(batch, -1).expand(-1, count)),
        weight=weight.repeat(count),
        level_next=levels[step + 1],
        x_next=by_step(trajectory.x_next),
        log_prob_old=by_step(trajectory.log_prob),
        transition=Transition(*(coefficient.expand(len(timesteps))[step] for coefficient in transitions)),
        predictions={} if trajectory.velocity is None else {"old": by_step(trajectory.velocity)},
    )


def last_steps(trajectory: Trajectory, schedule: Schedule, share: Share, key: Key, count: int, weight: Tensor) -> LastSteps:
    """Return one item per sample, before the last `count` steps, with the noise that these steps took.

    Args:
        trajectory: samples of this rank, with all of their steps.
        schedule: schedule of the trajectory.
        share: which samples these are.
        key: key of the rollout.
        count: number of steps.
        weight: weight in the loss of each sample, `[B]`.
    """
    x, device = trajectory.x[:, -count], weight.device
    first, batch = len(schedule.timesteps) - count, len(x)
    keys = fold_in(fold_in(key, Stream.SAMPLES), to_device(torch.tensor(share.numbers), device))
    noise = [normal(fold_in(fold_in(keys, Stream.STEPS), first + i), tuple(x.shape)) for i in range(count)]
    return LastSteps(
        x=x,
        level=to_device(schedule.levels[first], device).expand(batch),
        timestep=host_values.keep(lambda table: table[first].expand(batch), to_device(schedule.timesteps, device)),
        sample=to_device(torch.arange(batch), device),
        weight=weight,
        noise=torch.stack(noise, dim=1),
        predictions={},
    )


def by_step(tensor: Tensor) -> Tensor:
    """Return a value per sample and step as one per pair, `[B, S, ...]` -> `[S*B, ...]`."""
    return tensor.transpose(0, 1).flatten(0, 1)


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return trajectories with the same recorded steps, joined along the batch, `[B, S, ...]`.

    They are stored step by step, so that `recorded_steps` needs no other copy of them.
    """

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.transpose(0, 1) for part in parts], dim=1).transpose(0, 1)

    velocities = [each.velocity for each in trajectories if each.velocity is not None]
    return Trajectory(
        x=join([each.x for each in trajectories]),
        x_next=join([each.x_next for each in trajectories]),
        steps=host_values.join(*(each.steps for each in trajectories)),
        log_prob=join([each.log_prob for each in trajectories]),
        velocity=join(velocities) if velocities else None,
        final=torch.cat([each.final for each in trajectories]),
        debug=None,
    )
