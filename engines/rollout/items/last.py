"""The last steps of a rollout: the items of objectives that follow the gradient of a reward through them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Trajectory
from fluvial.engines.rollout.items.share import Share
from fluvial.engines.rollout.items.steps import at_step
from fluvial.engines.streams import Stream
from fluvial.models import Schedule


class LastSteps(NamedTuple):
    """P samples before the last K steps of their rollout, each field `[P, ...]`."""

    x: Tensor  # sample at which the model is evaluated
    level: Tensor  # its noise level
    timestep: Tensor  # timestep that the model is given
    sample: Tensor  # int64, row of the conditioning
    weight: Tensor  # weight in the loss: 1, or 0 for items that only fill up
    noise: Tensor  # [P, K, *event], noise of the last K steps
    predictions: dict[str, Tensor]  # of other policies at x, by name: old, ref, teacher, ema

    def parts(self, levels: Tensor) -> Tensor:
        """Return the step of the schedule that each item belongs to, bool `[P, T]`, given its `[T+1]` levels."""
        return at_step(self.level, levels)


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
    keys = fold_in(fold_in(key, Stream.SAMPLES), torch.tensor(share.numbers, device=device))
    noise = [normal(fold_in(fold_in(keys, Stream.STEPS), first + i), tuple(x.shape)) for i in range(count)]
    return LastSteps(
        x=x,
        level=schedule.levels[first].to(device).expand(batch),
        timestep=schedule.timesteps[first].to(device).expand(batch),
        sample=torch.arange(batch, device=device),
        weight=weight,
        noise=torch.stack(noise, dim=1),
        predictions={},
    )
