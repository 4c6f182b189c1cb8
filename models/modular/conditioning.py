"""Conditioning of a modular pipeline: what enters the steps of its loop, as tensors with one row per prompt.

Tensors are padded to those of the longest prompt, and numbers become one tensor with the sizes. All other values must be the
same for all prompts.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from fluvial.models.modular.blocks import Entered, is_scheduler
from fluvial.models.modular.streams import LoopStream
from fluvial.models.replay.checks import refusal
from fluvial.models.replay.recorded import pad_to

NUMBERS = (bool, int, float)
PLAIN = (str, bytes, torch.dtype, torch.device, torch.Size, slice, enum.Enum, type(None), np.ndarray)


class Same(NamedTuple):
    """A leaf that is another leaf of an earlier place."""

    place: int


class Row(NamedTuple):
    """A leaf that is a tensor of the prompt."""

    dtype: torch.dtype
    ndim: int
    device: str  # type of device that the blocks expect it on
    each_step: bool  # whether it has a first dimension of steps


class Form(NamedTuple):
    """What the values of all prompts have in common."""

    tree: Any  # an optree.PyTreeSpec
    leaves: tuple[Any, ...]  # Row, Same, the type of a number, or the value itself
    steps: int

    def alike(self, other: "Form") -> bool:
        """Return whether two prompts have values of the same kinds, and the same values that are not of a prompt."""
        if self.tree != other.tree or self.steps != other.steps:
            return False
        return all(map(_alike, self.leaves, other.leaves))

    def restore(self, rows: Sequence[Tensor], sizes: Sequence[float], step: int) -> dict[str, Any]:
        """Return the values that enter a step, from the tensors of one prompt and their sizes and numbers.

        Containers and tensors are new, so that what a step writes into them does not last. Tensors are contiguous, because
        the bits of a product depend on the layout.
        """
        numbers, tensors, restored = iter(sizes), iter(rows), list[Any]()
        for leaf in self.leaves:
            if isinstance(leaf, Row):
                tensor = next(tensors)
                part = tensor[tuple(slice(int(next(numbers))) for _ in range(tensor.ndim))]
                part = part[step] if leaf.each_step else part
                restored.append(part.to("cpu").clone() if leaf.device == "cpu" else part.contiguous().clone())
            elif isinstance(leaf, Same):
                restored.append(restored[leaf.place])
            elif isinstance(leaf, type) and leaf in NUMBERS:
                restored.append(leaf(next(numbers)))
            else:
                restored.append(leaf)
        return optree.tree_unflatten(self.tree, restored)


def describe(pipeline: str, entered: Entered, streams: Sequence[LoopStream]) -> tuple[Form, list[Tensor], list[float]]:
    """Return the form of a prompt's values, its tensors, and their sizes and its numbers.

    Args:
        pipeline: class of the pipeline, for messages.
        entered: values of the prompt.
        streams: what is stepped; of their values only the other elements are kept, if there are some.

    Raises:
        ReplayError: a value is neither a tensor, a number nor plain, or one that is not a tensor differs by step.
    """
    flat = [optree.tree_flatten(_without_samples(values, streams), none_is_leaf=True) for values in entered.values]
    tree, first = flat[0][1], flat[0][0]
    if any(other != tree for _, other in flat[1:]):
        raise refusal(pipeline, "its steps are given values of unlike kinds")
    leaves, rows, sizes, known = list[Any](), list[Tensor](), list[float](), dict[int, int]()
    for place, each in enumerate(zip(*(values for values, _ in flat), strict=True)):
        leaf = first[place]
        if isinstance(leaf, Tensor):
            if all(one is leaf for one in each) and id(leaf) in known:
                leaves.append(Same(known[id(leaf)]))
                continue
            known.setdefault(id(leaf), place)
            differs = any(one is not leaf and not torch.equal(one, leaf) for one in each)
            row = torch.stack([*each]) if differs else leaf
            leaves.append(Row(row.dtype, row.ndim, row.device.type, differs))
            rows.append(row.detach()[None])
            sizes += row.shape
            continue
        if is_scheduler(leaf) or isinstance(leaf, torch.Generator):
            leaves.append(leaf)
            continue
        if not all(one is leaf or _same(one, leaf) for one in each[1:]):
            raise refusal(pipeline, f"a value of its steps differs by step, and is a {type(leaf).__name__}")
        if type(leaf) in NUMBERS:
            leaves.append(type(leaf))
            sizes.append(float(leaf))
        elif isinstance(leaf, PLAIN) or (not callable(leaf) and type(leaf).__module__.startswith("PIL")):
            leaves.append(leaf)
        else:
            raise refusal(pipeline, f"its loop keeps a {type(leaf).__name__}, which may last from step to step")
    return Form(tree, tuple(leaves), len(entered.values)), rows, sizes


def pad_rows(rows: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of a prompt, padded to those of the longest."""
    return [pad_to(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def place_samples(values: dict[str, Any], x: Tensor, streams: Sequence[LoopStream]) -> dict[str, Any]:
    """Return the values of a step with a sample `[n]` in its places."""
    for stream, part in zip(streams, x.split([len(stream.places) for stream in streams]), strict=True):
        values[stream.field] = stream.place(part, values[stream.field])
    return values


def _without_samples(values: Mapping[str, Any], streams: Sequence[LoopStream]) -> dict[str, Any]:
    """Return values with zeros in place of samples, or None if a value consists of samples alone."""
    kept_values = dict(values)
    for name in {stream.field for stream in streams}:
        index = torch.cat([stream.places for stream in streams if stream.field == name])
        whole = kept_values[name]
        others = whole.flatten().index_fill(0, index, 0).reshape(whole.shape)
        kept_values[name] = None if len(index) == whole.numel() else others
    return kept_values


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, type) or isinstance(other, type) or isinstance(one, (Row, Same)) or isinstance(other, (Row, Same)):
        return bool(one == other)
    if is_scheduler(one) or isinstance(one, torch.Generator):
        return type(one) is type(other)
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    return bool(type(one) is type(other) and (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other))
