"""Items of an update: a pytree of tensors with one row per item, split into micro-batches, and the numbers they leave."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.models.host_values import fresh_copy, rows, to_device


def check_items(items: PyTree[Tensor], weight: Tensor | None, *, sizes: Sequence[int], pad_to: int | None) -> int:
    """Return the number of items.

    Raises:
        ValueError: there are none, tensors or weights differ in their number of rows, or a size is too small.
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
    """Return the sizes of the micro-batches of some items: each size as often as it is filled, the last for what is left.

    Args:
        count: number of items.
        sizes: sizes, falling; the last micro-batch of the last one may not be full.
    """
    passes = list[int]()
    for size in sizes[:-1]:
        passes += [size] * (count // size)
        count %= size
    return passes + [sizes[-1]] * -(-count // sizes[-1])


def micro_batches(
    items: PyTree[Tensor], *, micro_batch: int | Sequence[int], pad_to: int, device: torch.device
) -> Iterator[PyTree[Tensor]]:
    """Yield the items of a pytree, `[P, ...]`, in micro-batches on a device, of the sizes that `split` gives for `pad_to`.

    Missing rows repeat items from the first on. Each is a fresh copy, so that a forward pass has the same bits as that of
    the rollout, wherever its items lie among the others.
    """
    first, start = optree.tree_leaves(items)[0], 0
    held = len(first)
    for size in split(pad_to, [micro_batch] if isinstance(micro_batch, int) else micro_batch):
        stop = start + size
        place = slice(start, stop) if stop <= held else to_device(torch.arange(start, stop) % held, first.device)
        yield fresh_copy(optree.tree_map(lambda tensor, place=place: rows(tensor, place), items), device)
        start = stop


class PartNumbers(NamedTuple):
    """Diagnostics by part of an update's items, e.g. by step: one number per part, 0 for a part without items."""

    items: list[int]  # of all ranks
    mean: dict[str, list[float]]
    mean_abs: dict[str, list[float]]


class Diagnostics:
    """Numbers of an update's items, kept on the device until they are read back once, with everything else.

    Args:
        real: 1 for each item of this rank, 0 for those of weight 0 and the rows that fill up its last micro-batches, `[N]`.
        parts: parts of the update that an item counts in, bool `[P, S]` with P <= N; None splits nothing.
    """

    def __init__(self, real: Tensor, parts: Tensor | None = None) -> None:
        self.real, self.names = real, tuple[str, ...]()
        self.sums: Tensor | None = None
        self.peaks: Tensor | None = None
        self.parts, self.flops = parts, 0
        self.loss = torch.zeros((), device=real.device)
        self._leaves: list[Tensor] = []  # of all items, where they are split

    def add(self, info: Any, rows: slice, loss: Tensor, flops: int) -> None:
        """Add those of the micro-batch of some rows: a NamedTuple of tensors `[b]` or nothing, its loss and its FLOPs."""
        self.loss, self.flops = self.loss + loss.detach(), self.flops + flops
        counted = self.real[rows]
        self.names = info._fields if info else ()
        leaves = torch.stack([leaf.detach() for leaf in info]) * counted if info else counted.new_zeros(0, len(counted))
        self.sums = leaves.sum(1) if self.sums is None else self.sums + leaves.sum(1)
        peak = leaves.abs().amax(1)
        self.peaks = peak if self.peaks is None else torch.maximum(self.peaks, peak)
        if self.parts is not None:
            self._leaves.append(leaves)

    def row(self, memory: Sequence[float]) -> Tensor:
        """Return this rank's numbers as one row, with the sum of the losses and its bytes of memory."""
        assert self.sums is not None
        assert self.peaks is not None
        held = [self.loss.new_full((1,), size) for size in memory]
        return torch.cat([torch.stack([self.loss, self.real.sum()]), self.sums, self.peaks, *self._by_part(), *held])

    def _by_part(self) -> list[Tensor]:
        """Return the number of items, the sums and the sums of absolute values of each part."""
        if self.parts is None:
            return []
        leaves = torch.cat(self._leaves, dim=1)[:, None, : len(self.parts)]  # [K, 1, P]
        mask = (self.parts & (self.real[: len(self.parts), None] != 0)).T
        # No product with the mask: a NaN belongs to its own part alone.
        sums = [torch.where(mask, values, 0.0).sum(-1) for values in (leaves, leaves.abs())]
        return [mask.sum(1).to(leaves.dtype), sums[0].flatten(), sums[1].flatten()]

    def read(self, ranks: Sequence[Sequence[float]]) -> "Numbers":
        """Return what the rows of all ranks say, once they are on the host."""
        column = iter(zip(*ranks, strict=True))
        loss, items = sum(next(column)), sum(next(column))
        mean = {name: sum(next(column)) / max(items, 1) for name in self.names}
        max_abs = {name: float(np.max(next(column))) for name in self.names}  # NaN if one is
        parts = None
        if self.parts is not None:
            held = [sum(next(column)) for _ in range(self.parts.shape[1])]
            signed, size = (
                {name: [sum(next(column)) / max(number, 1) for number in held] for name in self.names} for _ in range(2)
            )
            parts = PartNumbers([int(number) for number in held], signed, size)
        return Numbers(loss, int(items), mean, max_abs, parts, memory=tuple(max(sizes) for sizes in column))


class Numbers(NamedTuple):
    """The diagnostics of an update over all ranks."""

    loss: float
    items: int
    mean: dict[str, float]
    max_abs: dict[str, float]
    parts: PartNumbers | None
    memory: tuple[float, ...]  # the largest of the ranks
