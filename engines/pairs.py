"""A stored trajectory as a flat set of (sample, step) pairs, which is all that an update sees.

Given x_t and x_{t+1}, the pairs of a trajectory are independent. Flattened, any chunk of them is a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.engines.distributed import World
from fluvial.models import Cond


class Pairs(NamedTuple):
    """P (sample, step) pairs, each field `[P, ...]`."""

    x: Tensor
    x_next: Tensor
    step: Tensor  # int64, index into the schedule
    log_prob_old: Tensor
    advantage: Tensor
    weight: Tensor  # 0 for pairs that only fill up
    sample: Tensor  # int64, the row of the conditioning that it was made with, which the steps of a sample share
    v_old: Tensor | None  # the velocity that the rollout was made with, if the objective asks for it
    v_ref: Tensor | None  # the reference model's velocity, if a KL term asks for it


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Join trajectories of the same recorded steps along the batch."""
    steps = trajectories[0].steps
    return optree.tree_map(lambda *parts: torch.cat(parts), *(t._replace(steps=t.steps[:0]) for t in trajectories))._replace(
        steps=steps
    )


def flatten(trajectory: Trajectory, advantage: Tensor, weight: Tensor) -> Pairs:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    Args:
        trajectory: B samples, S recorded steps.
        advantage, weight: `[B]`.
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
        sample=spread(torch.arange(batch, device=advantage.device)),
        v_old=None if trajectory.velocity is None else trajectory.velocity.transpose(0, 1).flatten(0, 1),
        v_ref=None,
    )


def kept(pairs: Pairs, adds: Tensor) -> Pairs:
    """Return the pairs that add something to the loss, in order; the others need not be computed.

    Args:
        pairs: P pairs.
        adds: `[P]` on the host, so that no device is waited for; 0 for pairs that add nothing.
    """
    rows = torch.nonzero(adds).flatten().to(pairs.step.device)
    return optree.tree_map(lambda tensor: tensor[rows], pairs)


def moves(counts: Sequence[int]) -> list[list[int]]:
    """Return how many pairs each rank gives to each, so that all have as many, but for one; few pairs are moved.

    Args:
        counts: pairs of each rank.
    """
    ranks = range(len(counts))
    share, more = divmod(sum(counts), len(counts))
    surplus = [count - share - (rank < more) for rank, count in enumerate(counts)]
    plan = [[0] * len(counts) for _ in ranks]
    for giver in ranks:
        for taker in ranks:
            if surplus[giver] > 0 > surplus[taker]:
                plan[giver][taker] = moved = min(surplus[giver], -surplus[taker])
                surplus[giver], surplus[taker] = surplus[giver] - moved, surplus[taker] + moved
    return plan


def balanced(pairs: Pairs, cond: Cond, counts: Sequence[int], world: World) -> tuple[Pairs, Cond]:
    """Move pairs between ranks as `moves` says, with their conditioning; every rank must take part.

    Args:
        pairs: of this rank, the last of which are given away.
        cond: a pytree of tensors `[B, ...]`, in which `pairs.sample` counts.
        counts: pairs of each rank, the same on all.
        world: of the processes.
    """
    plan, rank = moves(counts), world.data_rank
    send, receive = plan[rank], [row[rank] for row in plan]
    stay = len(pairs.step) - sum(send)

    def moved(tensor: Tensor) -> Tensor:
        return world.exchange(tensor[stay:], send, receive)

    rows = pairs.sample[stay:]
    known = len(optree.tree_leaves(cond)[0])
    received: Pairs = optree.tree_map(moved, pairs)
    received = received._replace(sample=known + torch.arange(sum(receive), device=rows.device))
    cond = optree.tree_map(lambda table: torch.cat([table, world.exchange(table[rows], send, receive)]), cond)
    return optree.tree_map(lambda own, new: torch.cat([own[:stay], new]), pairs, received), cond
