"""A stored trajectory as a flat set of (sample, step) pairs, which is all that an update sees.

Given x_t and x_{t+1}, the pairs of a trajectory are independent. Flattened, any chunk of them is a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.models import Cond


class Pairs(NamedTuple):
    """P (sample, step) pairs, each field `[P, ...]`."""

    x: Tensor
    x_next: Tensor
    step: Tensor  # int64, index into the schedule
    log_prob_old: Tensor
    advantage: Tensor
    weight: Tensor  # 0 for pairs that only fill up
    cond: Cond
    v_old: Tensor | None  # the velocity that the rollout was made with, if the objective asks for it
    v_ref: Tensor | None  # the reference model's velocity, if a KL term asks for it


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Join trajectories of the same recorded steps along the batch."""
    steps = trajectories[0].steps
    return optree.tree_map(lambda *parts: torch.cat(parts), *(t._replace(steps=t.steps[:0]) for t in trajectories))._replace(
        steps=steps
    )


def flatten(trajectory: Trajectory, advantage: Tensor, weight: Tensor, cond: Cond) -> Pairs:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    Args:
        trajectory: B samples, S recorded steps.
        advantage, weight: `[B]`.
        cond: a pytree of tensors `[B, ...]`.
    """
    batch, count = trajectory.log_prob.shape

    def spread(tensor: Tensor) -> Tensor:
        return tensor.repeat(count, *[1] * (tensor.ndim - 1))

    return Pairs(
        x=trajectory.x.transpose(0, 1).flatten(0, 1),
        x_next=trajectory.x_next.transpose(0, 1).flatten(0, 1),
        step=trajectory.steps.repeat_interleave(batch),
        log_prob_old=trajectory.log_prob.transpose(0, 1).flatten(),
        advantage=spread(advantage),
        weight=spread(weight),
        cond=optree.tree_map(spread, cond),
        v_old=None if trajectory.velocity is None else trajectory.velocity.transpose(0, 1).flatten(0, 1),
        v_ref=None,
    )


def kept(pairs: Pairs, adds: Tensor) -> Pairs:
    """Return the pairs that add something to the loss, in order; the others need not be computed.

    If none does, the first pair stays, with weight 0, so that there is something to run.

    Args:
        pairs: P pairs.
        adds: `[P]` on the host, so that no device is waited for; 0 for pairs that add nothing.
    """
    if not adds.any():
        first: Pairs = optree.tree_map(lambda tensor: tensor[:1], pairs)
        return first._replace(weight=torch.zeros_like(first.weight))
    rows = torch.nonzero(adds).flatten().to(pairs.step.device)
    return optree.tree_map(lambda tensor: tensor[rows], pairs)
