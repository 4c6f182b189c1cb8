"""The items of an update: a flat set of (sample, noise level) pairs, and all that the update sees.

Given x_t and x_{t+1}, the steps of a trajectory are independent, and so are samples that noise is put on. Flattened, any
slice of them is a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition
from fluvial.engines.fsdp.world import World
from fluvial.models import Cond, Schedule


class Items(NamedTuple):
    """P (sample, noise level) pairs, each field `[P, ...]`: recorded steps, or clean samples with noise on them.

    An item of preferences is two samples with the same noise: what has a sample's shape is then `[P, 2, *event]`, the
    preferred sample first.
    """

    x: Tensor  # sample at which the model is evaluated
    level: Tensor  # its noise level: sigma of a flow, alpha_bar of a model that predicts epsilon
    timestep: Tensor | None  # timestep that the model is given; None if the model derives it from the level
    sample: Tensor  # int64, row of the conditioning; the items of one sample share it
    target_weight: Tensor  # `Objective.target_weight` of the sample, e.g. its advantage
    weight: Tensor  # weight in the loss: 1, a correction of the rollout, or 0 for items that only fill up
    # Recorded steps only.
    level_next: Tensor | None = None
    x_next: Tensor | None = None
    log_prob_old: Tensor | None = None
    transition: Transition | None = None  # coefficients of each step, where an update has computed them for all items
    # Clean samples with noise only.
    x0: Tensor | None = None
    target: Tensor | None = None  # what the model should predict: noise - x0, or the noise for a model of epsilon
    # Predictions of other policies at x, where the objective or a KL term asks for them.
    v_old: Tensor | None = None
    v_ref: Tensor | None = None
    v_teacher: Tensor | None = None
    v_ema: Tensor | None = None
    noise: Tensor | None = None  # [P, K, *event], noise of the last K steps, where a reward's gradient flows through them
    context: Tensor | None = None  # what the other samples are to the loss, of an objective that gathers statistics
    # The other half of guidance, for a loss that combines the halves itself (`ObjectiveTraits.folds_guidance`).
    v_uncond: Tensor | None = None  # the policy's unconditional prediction
    guidance: Tensor | None = None  # guidance scale


class Share(NamedTuple):
    """The samples of a batch that one rank holds: first, first + 1, ...; a slot past the end of the batch is a repeat."""

    first: int
    slots: int
    batch: int

    @property
    def numbers(self) -> list[int]:
        """Index in the batch of the sample in each slot."""
        return [(self.first + slot) % self.batch for slot in range(self.slots)]

    def rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a value per sample of the batch, `[B, ...]` -> `[slots, ...]`, 0 for repeats."""
        spread = values.new_zeros((self.first + self.slots, *values.shape[1:]))
        held = min(self.batch, len(spread))
        spread[:held] = values[:held]
        return spread[self.first :]


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return trajectories with the same recorded steps, joined along the batch, `[B, S, ...]`.

    They are stored step by step, so that `flatten` needs no other copy of them.
    """

    def joined(*parts: Tensor) -> Tensor:
        return torch.cat([part.transpose(0, 1) for part in parts], dim=1).transpose(0, 1)

    first = trajectories[0]
    return Trajectory(
        x=joined(*(trajectory.x for trajectory in trajectories)),
        x_next=joined(*(trajectory.x_next for trajectory in trajectories)),
        steps=_joined_steps(trajectories),
        log_prob=joined(*(trajectory.log_prob for trajectory in trajectories)),
        velocity=None if first.velocity is None else joined(*(given(trajectory.velocity) for trajectory in trajectories)),
        final=torch.cat([trajectory.final for trajectory in trajectories]),
        debug=None,
    )


def _joined_steps(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the recorded steps of joined trajectories: `[S]` if they are the same for all samples, else `[B, S]`."""
    first = trajectories[0].steps
    if first.ndim == 1:  # a rollout whose windows differ has a row per sample, so that no device need be read
        return first
    return torch.cat([trajectory.steps for trajectory in trajectories])


def given(tensor: Tensor | None) -> Tensor:
    """Return a field that what was asked for has, so that it is not None."""
    assert tensor is not None
    return tensor


def flatten(trajectory: Trajectory, schedule: Schedule, target_weight: Tensor, weight: Tensor) -> Items:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    Args:
        trajectory: B samples with S recorded steps.
        schedule: schedule of the trajectory.
        target_weight: `Objective.target_weight` of each sample, `[B]`.
        weight: weight in the loss, `[B]` or `[B, S]`.
    """
    batch, count = trajectory.log_prob.shape
    device = target_weight.device
    levels, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)
    step = trajectory.steps.expand(batch, count).T.flatten()

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


def select(items: Items, adds: Tensor) -> Items:
    """Return the items that add something to the loss, in order; the others need not be computed.

    Args:
        items: P items.
        adds: `[P]` on the host, so that the device is not waited for; 0 for items that add nothing.
    """
    rows = torch.nonzero(adds).flatten().to(items.level.device)
    return optree.tree_map(lambda tensor: tensor[rows], items)


def transfers(counts: Sequence[int]) -> list[list[int]]:
    """Return how many items each rank sends to each other rank, so that their numbers differ by at most one.

    Args:
        counts: number of items of each rank.
    """
    ranks = range(len(counts))
    share, more = divmod(sum(counts), len(counts))
    surplus = [count - share - (rank < more) for rank, count in enumerate(counts)]
    plan = [[0] * len(counts) for _ in ranks]
    for sender in ranks:
        for receiver in ranks:
            if surplus[sender] > 0 > surplus[receiver]:
                plan[sender][receiver] = moved = min(surplus[sender], -surplus[receiver])
                surplus[sender], surplus[receiver] = surplus[sender] - moved, surplus[receiver] + moved
    return plan


def rebalance(items: Items, cond: Cond, counts: Sequence[int], world: World) -> tuple[Items, Cond]:
    """Return items and conditioning after moving items between ranks as `transfers` says; every rank must take part.

    Args:
        items: items of this rank; the last ones are sent.
        cond: conditioning, a pytree of tensors `[B, ...]` that `items.sample` indexes.
        counts: number of items of each rank, the same on all ranks.
        world: process group that the items are spread over.
    """
    plan, rank = transfers(counts), world.data_rank
    send, receive = plan[rank], [row[rank] for row in plan]
    stay = len(items.level) - sum(send)

    def moved(tensor: Tensor) -> Tensor:
        return world.exchange(tensor[stay:], send, receive)

    rows = items.sample[stay:]
    known = len(optree.tree_leaves(cond)[0])
    received: Items = optree.tree_map(moved, items)
    received = received._replace(sample=known + torch.arange(sum(receive), device=rows.device))
    cond = optree.tree_map(lambda table: torch.cat([table, world.exchange(table[rows], send, receive)]), cond)
    return optree.tree_map(lambda own, new: torch.cat([own[:stay], new]), items, received), cond
