"""What an update sees, and all that it sees: a flat set of (sample, noise level) pairs.

Given x_t and x_{t+1}, the steps of a trajectory are independent, and so are samples with noise put on anew. Flattened, any
chunk of them is a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.engines.fsdp.world import World
from fluvial.models import Cond, Schedule


class Items(NamedTuple):
    """P (sample, noise level) pairs, each field `[P, ...]`: recorded steps of a rollout, or samples with noise put on anew.

    Preferences are pairs of two samples: what has a sample's shape is `[P, 2, *event]` then, the preferred one first.
    """

    x: Tensor  # where the velocity is taken
    level: Tensor  # its noise level (alpha_bar for a model of epsilon)
    timestep: Tensor | None  # what the model is given for it; None: it is derived from the level
    sample: Tensor  # int64, the row of the conditioning that it was made with, which the steps of a sample share
    target_weight: Tensor  # what the sample's reward is to the objective, e.g. its advantage
    weight: Tensor  # of the loss; 0 for pairs that only fill up
    # Of recorded steps.
    level_next: Tensor | None = None
    x_next: Tensor | None = None
    log_prob_old: Tensor | None = None
    # Of samples with noise put on anew.
    x0: Tensor | None = None
    target: Tensor | None = None  # noise - x0, or the noise for a model of epsilon
    # Other velocities at x, where the objective or a KL term asks for them.
    v_old: Tensor | None = None
    v_ref: Tensor | None = None
    v_teacher: Tensor | None = None


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Join trajectories of the same recorded steps along the batch."""
    steps = trajectories[0].steps
    return optree.tree_map(lambda *parts: torch.cat(parts), *(t._replace(steps=t.steps[:0]) for t in trajectories))._replace(
        steps=steps
    )


def flatten(trajectory: Trajectory, schedule: Schedule, target_weight: Tensor, weight: Tensor) -> Items:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    Args:
        trajectory: B samples, S recorded steps.
        schedule: that it followed.
        target_weight: `[B]`.
        weight: `[B]`, or `[B, S]`.
    """
    batch, count = trajectory.log_prob.shape
    device = target_weight.device
    levels, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)
    step = trajectory.steps.repeat_interleave(batch)

    def by_step(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).flatten(0, 1)

    return Items(
        x=by_step(trajectory.x),
        level=levels[step],
        timestep=timesteps[step],
        sample=torch.arange(batch, device=device).repeat(count),
        target_weight=target_weight.repeat(count),
        weight=by_step(weight) if weight.ndim == 2 else weight.repeat(count),
        level_next=levels[step + 1],
        x_next=by_step(trajectory.x_next),
        log_prob_old=by_step(trajectory.log_prob),
        v_old=None if trajectory.velocity is None else by_step(trajectory.velocity),
    )


def select(pairs: Items, adds: Tensor) -> Items:
    """Return the pairs that add something to the loss, in order; the others need not be computed.

    Args:
        pairs: P pairs.
        adds: `[P]` on the host, so that no device is waited for; 0 for pairs that add nothing.
    """
    rows = torch.nonzero(adds).flatten().to(pairs.level.device)
    return optree.tree_map(lambda tensor: tensor[rows], pairs)


def transfers(counts: Sequence[int]) -> list[list[int]]:
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


def rebalance(pairs: Items, cond: Cond, counts: Sequence[int], world: World) -> tuple[Items, Cond]:
    """Move pairs between ranks as `transfers` says, with their conditioning; every rank must take part.

    Args:
        pairs: of this rank, the last of which are given away.
        cond: a pytree of tensors `[B, ...]`, in which `pairs.sample` counts.
        counts: pairs of each rank, the same on all.
        world: of the world.
    """
    plan, rank = transfers(counts), world.data_rank
    send, receive = plan[rank], [row[rank] for row in plan]
    stay = len(pairs.level) - sum(send)

    def moved(tensor: Tensor) -> Tensor:
        return world.exchange(tensor[stay:], send, receive)

    rows = pairs.sample[stay:]
    known = len(optree.tree_leaves(cond)[0])
    received: Items = optree.tree_map(moved, pairs)
    received = received._replace(sample=known + torch.arange(sum(receive), device=rows.device))
    cond = optree.tree_map(lambda table: torch.cat([table, world.exchange(table[rows], send, receive)]), cond)
    return optree.tree_map(lambda own, new: torch.cat([own[:stay], new]), pairs, received), cond
