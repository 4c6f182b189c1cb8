"""Steps of a rollout: the items of methods with a ratio per step, or with a reward's gradient through steps.

Each rank has its share of a batch; `rebalance` moves items between ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fluvial.core.checks import first_block
from fluvial.core.random import Key, fold_in, normal
from fluvial.core.rollout import Trajectory
from fluvial.core.transitions import Transition
from fluvial.engines.engine.world import World, collective
from fluvial.engines.streams import Stream
from fluvial.models import Cond, Schedule, host_values
from fluvial.models.device import is_accelerator
from fluvial.models.host_values import join, recall, remember, select_rows, to_device

Kind = TypeVar("Kind", bound=Any)  # a kind of items, a NamedTuple of tensors `[P, ...]`


class Share(NamedTuple):
    """One rank's samples of a batch: first, first + 1, ...; slots past the end of the batch are repeats."""

    first: int
    slots: int
    batch: int

    @property
    def numbers(self) -> list[int]:
        """Index of each slot's sample in the batch."""
        return [(self.first + slot) % self.batch for slot in range(self.slots)]

    def rows(self, values: Tensor) -> Tensor:
        """Return this rank's part of a value per sample of the batch, `[B, ...] -> [slots, ...]`, 0 for repeats."""
        padded = values.new_zeros((self.first + self.slots, *values.shape[1:]))
        count = min(self.batch, len(padded))
        padded[:count] = values[:count]
        return padded[self.first :]


def select(items: Kind, counted: Tensor) -> Kind:
    """Return the items that contribute to the loss, in order.

    `counted`, `[P]`, is 0 for items that contribute nothing; it is on the host, to avoid a device synchronisation.
    """
    index = to_device(torch.nonzero(counted).flatten(), items.level.device)
    chosen: Kind = optree.tree_map(lambda tensor: select_rows(tensor, index), items)
    return chosen


def transfers(counts: Sequence[int]) -> list[list[int]]:
    """Return the number of items that each rank sends to each other rank, so that their counts differ by at most one."""
    ranks = range(len(counts))
    share, remainder = divmod(sum(counts), len(counts))
    surplus = [count - share - (rank < remainder) for rank, count in enumerate(counts)]
    plan = [[0] * len(counts) for _ in ranks]
    for sender in ranks:
        for receiver in ranks:
            if surplus[sender] > 0 > surplus[receiver]:
                plan[sender][receiver] = moved = min(surplus[sender], -surplus[receiver])
                surplus[sender], surplus[receiver] = surplus[sender] - moved, surplus[receiver] + moved
    return plan


@collective
def rebalance(items: Kind, cond: Cond, counts: Sequence[int], world: World) -> tuple[Kind, Cond]:
    """Move items and their conditioning between ranks to even out their numbers (`transfers`).

    Args:
        items: items of this rank; the last ones are sent.
        cond: conditioning, a pytree of tensors `[B, ...]` that `items.sample` indexes.
        counts: number of items on each rank, the same list on all ranks.
        world: process group that the items are spread over.
    """
    plan, rank = transfers(counts), world.data_rank
    send, receive = plan[rank], [row[rank] for row in plan]
    stay = len(items.level) - sum(send)

    sample = select_rows(items.sample, slice(stay, None))
    leaves, structure = optree.tree_flatten(
        (
            optree.tree_map(lambda tensor: select_rows(tensor, slice(stay, None)), items),
            optree.tree_map(lambda table: select_rows(table, sample), cond),
        )
    )
    received = [world.exchange(leaf, send, receive) for leaf in leaves]
    if is_accelerator(sample.device):  # host copies of values are exchanged, too
        host_leaves = world.gather_items([recall(leaf) for leaf in leaves])[:: world.sequence]
        for leaf, *hosts in zip(received, *host_leaves, strict=True):
            parts = [host[sum(row[:rank]) :][: row[rank]] for host, row in zip(hosts, plan, strict=True) if host is not None]
            if parts and sum(map(len, parts)) == sum(receive):  # all senders have host copies
                remember(leaf, torch.cat(parts))
    new_items, new_cond = optree.tree_unflatten(structure, received)
    first = len(optree.tree_leaves(cond)[0])
    new_items = new_items._replace(sample=to_device(first + torch.arange(sum(receive)), sample.device))
    joined: Kind = optree.tree_map(lambda old, new: join(select_rows(old, slice(stay)), new), items, new_items)
    return joined, optree.tree_map(join, cond, new_cond)


class RecordedSteps(NamedTuple):
    """P recorded steps, each field `[P, ...]`."""

    x: Tensor  # sample before the step, input of the model
    level: Tensor  # its noise level: sigma (flow) or alpha_bar (epsilon prediction); [P, R] if its R rows have their own
    timestep: Tensor  # timestep for the model
    sample: Tensor  # int64, index of the conditioning, which all items of a sample share
    signal: Tensor  # number per sample or step from the method, e.g. the advantage
    weight: Tensor  # weight in the loss: 1, or 0 for padding
    level_next: Tensor
    x_next: Tensor
    log_prob_old: Tensor
    transition: Transition  # coefficients of each step
    predictions: dict[str, Tensor]  # predictions of other networks at x, by name: old, ref, teacher, ema, uncond
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat
    context: Tensor | None = None  # values that the method computed from all items
    guidance: Tensor | None = None  # guidance scale, if the loss combines the halves (`Run.update(split_guidance=True)`)

    @property
    def dt(self) -> Tensor:
        """Change of the noise level over the step, `[P]` or `[P, R]`."""
        return self.level_next - self.level

    def find_parts(self, levels: Tensor) -> Tensor:
        """Return which step of the schedule each item is, bool `[P, T]`, given the schedule's levels, `[T+1]`."""
        return find_step(self.level, levels)


class LastSteps(NamedTuple):
    """P samples before the last K steps of their rollout, each field `[P, ...]`."""

    x: Tensor  # sample before the steps, input of the model
    level: Tensor  # its noise level
    timestep: Tensor  # timestep for the model
    sample: Tensor  # int64, index of the conditioning
    weight: Tensor  # weight in the loss: 1, or 0 for padding
    noise: Tensor  # [P, K, *event], noise of the last K steps
    predictions: dict[str, Tensor]  # predictions of other networks at x, by name: old, ref, teacher, ema
    place: Tensor | None = None  # int64, index of the item among the B * M of all ranks; B * M for a repeat

    def find_parts(self, levels: Tensor) -> Tensor:
        """Return which step of the schedule each item is, bool `[P, T]`, given the schedule's levels, `[T+1]`."""
        return find_step(self.level, levels)


def find_step(level: Tensor, levels: Tensor) -> Tensor:
    """Return which step of the schedule begins at each level, bool `[P, T]`; of levels per block the first counts."""
    return first_block(level)[:, None] == to_device(first_block(levels)[:-1], level.device)


def make_recorded_steps(
    trajectory: Trajectory, schedule: Schedule, transitions: Transition, signal: Tensor, weight: Tensor
) -> RecordedSteps:
    """Return the B * S items of a trajectory, ordered by step: item s * B + i is sample i at recorded step s.

    The fields of the trajectory are not copied.

    Args:
        trajectory: B samples with S recorded steps.
        schedule: schedule of the trajectory.
        transitions: coefficients of each step of the schedule, see `core.table.step_coefficients`.
        signal: number from the method per sample, `[B]`, or per step, `[B, S]`.
        weight: weight in the loss, `[B]`.
    """
    batch, count = trajectory.log_prob.shape
    device = signal.device
    levels, timesteps = to_device(schedule.levels, device), to_device(schedule.timesteps, device)
    step = host_values.compute_known(lambda steps: steps.T.flatten(), trajectory.steps)
    return RecordedSteps(
        x=flatten_steps(trajectory.x),
        level=levels[step],
        timestep=host_values.select_rows(timesteps, step),
        sample=to_device(torch.arange(batch).repeat(count), device),
        signal=flatten_steps(signal.reshape(batch, -1).expand(-1, count)),
        weight=weight.repeat(count),
        level_next=levels[step + 1],
        x_next=flatten_steps(trajectory.x_next),
        log_prob_old=flatten_steps(trajectory.log_prob),
        transition=Transition(*(coefficient[step] for coefficient in transitions)),
        predictions={} if trajectory.velocity is None else {"old": flatten_steps(trajectory.velocity)},
    )


def last_steps(trajectory: Trajectory, schedule: Schedule, share: Share, key: Key, count: int, weight: Tensor) -> LastSteps:
    """Return one item per sample: its state before the last `count` steps, and the noise of these steps.

    Args:
        trajectory: samples of this rank, with all of their steps.
        schedule: schedule of the trajectory.
        share: this rank's share of the batch.
        key: key of the rollout.
        count: number of steps.
        weight: weight of each sample in the loss, `[B]`.
    """
    x, device = trajectory.x[:, -count], weight.device
    first, batch = len(schedule.timesteps) - count, len(x)
    keys = fold_in(fold_in(key, Stream.SAMPLES), to_device(torch.tensor(share.numbers), device))
    noise = [normal(fold_in(fold_in(keys, Stream.STEPS), first + i), tuple(x.shape)) for i in range(count)]
    return LastSteps(
        x=x,
        level=to_device(schedule.levels[first], device).expand(batch, *schedule.levels.shape[1:]),
        timestep=host_values.compute_known(lambda table: table[first].expand(batch), to_device(schedule.timesteps, device)),
        sample=to_device(torch.arange(batch), device),
        weight=weight,
        noise=torch.stack(noise, dim=1),
        predictions={},
    )


def flatten_steps(tensor: Tensor) -> Tensor:
    """Flatten values per sample and step to values per item, `[B, S, ...] -> [S * B, ...]`."""
    return tensor.transpose(0, 1).flatten(0, 1)


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Concatenate trajectories with the same recorded steps along the batch, `[B, S, ...]`.

    The result is stored step by step, so that `make_recorded_steps` does not copy it.
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
