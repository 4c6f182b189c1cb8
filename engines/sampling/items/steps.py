"""Steps of a rollout: the items of objectives that compare them, or follow the gradient of a reward through them.

Each rank holds its share of a batch; items may change ranks (`rebalance`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fluvial.core.checks import first_row
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition
from fluvial.engines.engine.world import World, collective
from fluvial.engines.streams import Stream
from fluvial.models import Cond, Schedule, host_values
from fluvial.models.device import is_accelerator
from fluvial.models.host_values import join, recall, remember, rows, to_device

Kind = TypeVar("Kind", bound=Any)  # a kind of items, a NamedTuple of tensors `[P, ...]`


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


def select(items: Kind, counted: Tensor) -> Kind:
    """Return the items that add something to the loss, in order; the others need not be computed.

    `counted` is 0 for items that add nothing, `[P]`, on the host, so that the device is not waited for.
    """
    index = to_device(torch.nonzero(counted).flatten(), items.level.device)
    chosen: Kind = optree.tree_map(lambda tensor: rows(tensor, index), items)
    return chosen


def transfers(counts: Sequence[int]) -> list[list[int]]:
    """Return how many of its items each rank sends to each other rank, so that their numbers differ by at most one."""
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


@collective
def rebalance(items: Kind, cond: Cond, counts: Sequence[int], world: World) -> tuple[Kind, Cond]:
    """Return items and conditioning after moving items between ranks as `transfers` says.

    Args:
        items: items of this rank; the last ones are sent.
        cond: conditioning, a pytree of tensors `[B, ...]` that `items.sample` indexes.
        counts: number of items of each rank, the same on all ranks.
        world: process group that the items are spread over.
    """
    plan, rank = transfers(counts), world.data_rank
    send, receive = plan[rank], [row[rank] for row in plan]
    stay = len(items.level) - sum(send)

    sample = rows(items.sample, slice(stay, None))
    leaves, structure = optree.tree_flatten(
        (
            optree.tree_map(lambda tensor: rows(tensor, slice(stay, None)), items),
            optree.tree_map(lambda table: rows(table, sample), cond),
        )
    )
    received = [world.exchange(leaf, send, receive) for leaf in leaves]
    if is_accelerator(sample.device):  # what the host knows is sent between hosts
        everyone = world.gather_items([recall(leaf) for leaf in leaves])[:: world.sequence]
        for leaf, *hosts in zip(received, *everyone, strict=True):
            parts = [host[sum(row[:rank]) :][: row[rank]] for host, row in zip(hosts, plan, strict=True) if host is not None]
            if parts and sum(map(len, parts)) == sum(receive):  # every sender knows its values
                remember(leaf, torch.cat(parts))
    new_items, new_cond = optree.tree_unflatten(structure, received)
    first = len(optree.tree_leaves(cond)[0])
    new_items = new_items._replace(sample=to_device(first + torch.arange(sum(receive)), sample.device))
    kept: Kind = optree.tree_map(lambda kept_rows, new: join(rows(kept_rows, slice(stay)), new), items, new_items)
    return kept, optree.tree_map(join, cond, new_cond)


class RecordedSteps(NamedTuple):
    """P recorded steps, each field `[P, ...]`."""

    x: Tensor  # sample at which the model is evaluated
    level: Tensor  # its noise level: sigma of a flow, alpha_bar of an epsilon-prediction model; [P, R] of R rows
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
        """Change of the noise level over the step, `[P]` or `[P, R]`."""
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
    """Return which of a schedule's steps begins at each level, of the first row, bool `[P, T]`."""
    return first_row(level)[:, None] == to_device(first_row(levels)[:-1], level.device)


def recorded_steps(
    trajectory: Trajectory, schedule: Schedule, transitions: Transition, signal: Tensor, weight: Tensor
) -> RecordedSteps:
    """Return the B*S pairs of a trajectory, step by step: pair s * B + i is sample i at recorded step s.

    The fields of the trajectory are not copied.

    Args:
        trajectory: B samples with S recorded steps.
        schedule: schedule of the trajectory.
        transitions: coefficients of each step of the schedule, see `core.table.step_coefficients`.
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
        transition=Transition(*(coefficient[step] for coefficient in transitions)),
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
        level=to_device(schedule.levels[first], device).expand(batch, *schedule.levels.shape[1:]),
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
