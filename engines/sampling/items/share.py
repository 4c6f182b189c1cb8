"""The samples and items that each rank holds: its share of a batch, and items that change ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.models import Cond
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


def rebalance(items: Kind, cond: Cond, counts: Sequence[int], world: World) -> tuple[Kind, Cond]:
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
    kept: Kind = optree.tree_map(lambda own, new: join(rows(own, slice(stay)), new), items, new_items)
    return kept, optree.tree_map(join, cond, new_cond)
