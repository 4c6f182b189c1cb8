"""Items of an update: a pytree of tensors with one row per item, split into micro-batches, and their diagnostics."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.models.host_values import fresh_copy, select_rows, to_device


def check_items(items: PyTree[Tensor], weight: Tensor | None, *, sizes: Sequence[int], pad_to: int | None) -> int:
    """Check the items of an update, and return their number.

    Raises:
        ValueError: there are no items, tensors or weights differ in their number of rows, or a size is too small.
    """
    leaves = optree.tree_leaves(items)
    counts = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise ValueError(f"update: items have shapes {shapes}, expected tensors [P, ...] with one row per item, P >= 1")
    count = counts.pop()
    if weight is not None and weight.shape != (count,):
        raise ValueError(f"update: weight has shape {list(weight.shape)}, expected [{count}], one number per item")
    if sizes and min(sizes) < 1:
        raise UsageError(f"update: `micro_batch` is {min(sizes)}, expected at least 1")
    if pad_to is not None and pad_to < count:
        raise ValueError(f"update: pad_to is {pad_to}, expected at least the {count} items of this rank")
    return count


def split(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of micro-batches: each available size as often as it fits, the last one for the remainder.

    Args:
        count: number of items.
        sizes: available sizes, largest first; the last micro-batch may not be full.
    """
    passes = list[int]()
    for size in sizes[:-1]:
        passes += [size] * (count // size)
        count %= size
    return passes + [sizes[-1]] * -(-count // sizes[-1])


def micro_batches(
    items: PyTree[Tensor], *, micro_batch: int | Sequence[int], pad_to: int, device: torch.device
) -> Iterator[PyTree[Tensor]]:
    """Yield the items of a pytree, `[P, ...]`, on a device in micro-batches of the sizes that `split` returns for `pad_to`.

    Items are repeated, from the first on, to fill `pad_to` rows. Each micro-batch is a fresh copy, so a forward pass has the
    bits of the rollout's, whatever the positions of its items.
    """
    first, start = optree.tree_leaves(items)[0], 0
    count = len(first)
    for size in split(pad_to, [micro_batch] if isinstance(micro_batch, int) else micro_batch):
        stop = start + size
        index = slice(start, stop) if stop <= count else to_device(torch.arange(start, stop) % count, first.device)
        yield fresh_copy(optree.tree_map(lambda tensor, index=index: select_rows(tensor, index), items), device)
        start = stop


class PartNumbers(NamedTuple):
    """Diagnostics per part of an update's items, e.g. per step; 0 for a part without items."""

    items: list[int]  # of all ranks
    mean: dict[str, list[float]]
    mean_abs: dict[str, list[float]]


class Diagnostics:
    """Diagnostics of an update's items, accumulated on the device and read back once.

    Args:
        real: 1 for each item of this rank, 0 for items of weight 0 and for padding rows, `[N]`.
        parts: whether an item belongs to a part of the update, bool `[P, S]` with P <= N; None splits nothing.
    """

    def __init__(self, real: Tensor, parts: Tensor | None = None) -> None:
        self.real, self.names = real, tuple[str, ...]()
        self.sums: Tensor | None = None
        self.peaks: Tensor | None = None
        self.parts, self.flops = parts, 0
        self.loss = torch.zeros((), device=real.device)
        self._leaves: list[Tensor] = []  # of all items, if they are split by part

    def add(self, info: Any, rows: slice, loss: Tensor, flops: int) -> None:
        """Add the diagnostics of a micro-batch (a NamedTuple of tensors `[b]`, or empty), its loss and its FLOPs."""
        self.loss, self.flops = self.loss + loss.detach(), self.flops + flops
        counted = self.real[rows]
        self.names = info._fields if info else ()
        leaves = torch.stack([leaf.detach() for leaf in info]) * counted if info else counted.new_zeros(0, len(counted))
        self.sums = leaves.sum(1) if self.sums is None else self.sums + leaves.sum(1)
        peak = leaves.abs().amax(1)
        self.peaks = peak if self.peaks is None else torch.maximum(self.peaks, peak)
        if self.parts is not None:
            self._leaves.append(leaves)

    def pack(self, memory: Sequence[float]) -> Tensor:
        """Return this rank's diagnostics as one row, with the sum of its losses and its memory in bytes."""
        assert self.sums is not None
        assert self.peaks is not None
        sizes = [self.loss.new_full((1,), size) for size in memory]
        return torch.cat([torch.stack([self.loss, self.real.sum()]), self.sums, self.peaks, *self._by_part(), *sizes])

    def _by_part(self) -> list[Tensor]:
        """Return the number of items, the sums and the sums of absolute values, per part."""
        if self.parts is None:
            return []
        leaves = torch.cat(self._leaves, dim=1)[:, None, : len(self.parts)]  # [K, 1, P]
        mask = (self.parts & (self.real[: len(self.parts), None] != 0)).T
        # Not a product with the mask, so that a NaN stays in its own part.
        sums = [torch.where(mask, values, 0.0).sum(-1) for values in (leaves, leaves.abs())]
        return [mask.sum(1).to(leaves.dtype), sums[0].flatten(), sums[1].flatten()]

    def read(self, ranks: Sequence[Sequence[float]]) -> "Numbers":
        """Combine the rows of all ranks, on the host."""
        column = iter(zip(*ranks, strict=True))
        loss, items = sum(next(column)), sum(next(column))
        mean = {name: sum(next(column)) / max(items, 1) for name in self.names}
        max_abs = {name: float(np.max(next(column))) for name in self.names}  # NaN if any is
        parts = None
        if self.parts is not None:
            counts = [sum(next(column)) for _ in range(self.parts.shape[1])]
            signed, size = (
                {name: [sum(next(column)) / max(count, 1) for count in counts] for name in self.names} for _ in range(2)
            )
            parts = PartNumbers([int(count) for count in counts], signed, size)
        return Numbers(loss, int(items), mean, max_abs, parts, memory=tuple(max(sizes) for sizes in column))


class Numbers(NamedTuple):
    """The diagnostics of an update over all ranks."""

    loss: float
    items: int
    mean: dict[str, float]
    max_abs: dict[str, float]
    parts: PartNumbers | None
    memory: tuple[float, ...]  # largest over the ranks, in bytes
