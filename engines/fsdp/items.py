"""Items of an update: a pytree of tensors with one row per item, split into micro-batches of one size."""

from collections.abc import Iterator

import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.engines.fsdp.determinism import fresh_copy


def check_items(items: PyTree[Tensor], weight: Tensor | None, *, micro_batch: int | None, pad_to: int | None) -> int:
    """Return the number of items.

    Raises:
        ValueError: there are none, tensors or weights differ in their number of rows, or a size is too small.
    """
    leaves = optree.tree_leaves(items)
    sizes = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise ValueError(f"update: items have shapes {shapes}, expected tensors [P, ...] with one row per item, P >= 1")
    count = sizes.pop()
    if weight is not None and weight.shape != (count,):
        raise ValueError(f"update: weight has shape {list(weight.shape)}, expected [{count}], one number per item")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"update: micro_batch is {micro_batch}, expected at least 1")
    if pad_to is not None and pad_to < count:
        raise ValueError(f"update: pad_to is {pad_to}, expected at least the {count} items of this rank")
    return count


def micro_batches(items: PyTree[Tensor], *, micro_batch: int, pad_to: int, device: torch.device) -> Iterator[PyTree[Tensor]]:
    """Yield the items of a pytree, `[P, ...]`, in ceil(pad_to / micro_batch) micro-batches on a device.

    All have the same size: missing rows repeat items from the first on. Each is a fresh copy, so that a forward pass has the
    same bits as that of the rollout, wherever its items lie among the others.
    """
    first = optree.tree_leaves(items)[0]
    held = len(first)
    for start in range(0, pad_to, micro_batch):
        stop = start + micro_batch
        rows = slice(start, stop) if stop <= held else torch.arange(start, stop, device=first.device) % held
        yield fresh_copy(optree.tree_map(lambda tensor, rows=rows: tensor[rows], items), device)
