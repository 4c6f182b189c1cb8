"""Conditioning of a modular pipeline: the inputs of its loop's steps, as tensors with one row per prompt.

Tensors are padded to the sizes of the longest prompt's, and numbers become one tensor with the sizes. All other values must
be the same for all prompts.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from fluvial.models.modular.blocks import LoopInputs, is_scheduler
from fluvial.models.modular.streams import LoopStream
from fluvial.models.replay.checks import build_error
from fluvial.models.replay.recorded import pad_to

NUMBERS = (bool, int, float)
PLAIN = (str, bytes, torch.dtype, torch.device, torch.Size, slice, enum.Enum, type(None), np.ndarray)


class RepeatedLeaf(NamedTuple):
    """A leaf that is the same object as an earlier leaf."""

    leaf: int  # index of the earlier leaf


class PromptTensor(NamedTuple):
    """A leaf that is a tensor of the prompt."""

    dtype: torch.dtype
    ndim: int
    device: str  # type of device that the blocks expect it on
    each_step: bool  # whether it has a first dimension of steps


class ConditioningLayout(NamedTuple):
    """Structure that the inputs of all prompts share."""

    tree: Any  # an optree.PyTreeSpec
    leaves: tuple[Any, ...]  # PromptTensor, RepeatedLeaf, the type of a number, or the value itself
    steps: int

    def matches(self, other: "ConditioningLayout") -> bool:
        """Return whether two prompts have inputs of the same kinds, and the same values for all shared leaves."""
        if self.tree != other.tree or self.steps != other.steps:
            return False
        return all(map(_matches, self.leaves, other.leaves))

    def restore(self, rows: Sequence[Tensor], sizes: Sequence[float], step: int) -> dict[str, Any]:
        """Return the inputs of a step, from the tensors of one prompt and their sizes and numbers.

        Containers and tensors are new, so that a step's writes into them do not last. Tensors are contiguous, because the
        bits of a product depend on the layout.
        """
        numbers, tensors, restored = iter(sizes), iter(rows), list[Any]()
        for leaf in self.leaves:
            if isinstance(leaf, PromptTensor):
                tensor = next(tensors)
                part = tensor[tuple(slice(int(next(numbers))) for _ in range(tensor.ndim))]
                part = part[step] if leaf.each_step else part
                restored.append(part.to("cpu").clone() if leaf.device == "cpu" else part.contiguous().clone())
            elif isinstance(leaf, RepeatedLeaf):
                restored.append(restored[leaf.leaf])
            elif isinstance(leaf, type) and leaf in NUMBERS:
                restored.append(leaf(next(numbers)))
            else:
                restored.append(leaf)
        return optree.tree_unflatten(self.tree, restored)


def split_inputs(
    pipeline: str, loop_inputs: LoopInputs, streams: Sequence[LoopStream]
) -> tuple[ConditioningLayout, list[Tensor], list[float]]:
    """Return the layout of a prompt's inputs, its tensors, and the tensors' sizes with its numbers.

    Args:
        pipeline: class of the pipeline, for messages.
        loop_inputs: inputs of the steps for the prompt.
        streams: streams, whose elements are replaced by zeros; a value that consists of them alone is left out.

    Raises:
        ReplayError: a value is neither a tensor, a number nor plain, or a value other than a tensor differs by step.
    """
    flat = [optree.tree_flatten(_remove_samples(values, streams), none_is_leaf=True) for values in loop_inputs.values]
    tree, first = flat[0][1], flat[0][0]
    if any(other != tree for _, other in flat[1:]):
        raise build_error(pipeline, "its steps are given values of unlike kinds")
    leaves, rows, sizes, known = list[Any](), list[Tensor](), list[float](), dict[int, int]()
    for number, each in enumerate(zip(*(values for values, _ in flat), strict=True)):
        leaf = first[number]
        if isinstance(leaf, Tensor):
            if all(one is leaf for one in each) and id(leaf) in known:
                leaves.append(RepeatedLeaf(known[id(leaf)]))
                continue
            known.setdefault(id(leaf), number)
            differs = any(one is not leaf and not torch.equal(one, leaf) for one in each)
            row = torch.stack([*each]) if differs else leaf
            leaves.append(PromptTensor(row.dtype, row.ndim, row.device.type, differs))
            rows.append(row.detach()[None])
            sizes += row.shape
            continue
        if is_scheduler(leaf) or isinstance(leaf, torch.Generator):
            leaves.append(leaf)
            continue
        if not all(one is leaf or _is_same(one, leaf) for one in each[1:]):
            raise build_error(pipeline, f"a value of its steps differs by step, and is a {type(leaf).__name__}")
        if type(leaf) in NUMBERS:
            leaves.append(type(leaf))
            sizes.append(float(leaf))
        elif isinstance(leaf, PLAIN) or (not callable(leaf) and type(leaf).__module__.startswith("PIL")):
            leaves.append(leaf)
        else:
            raise build_error(pipeline, f"its loop keeps a {type(leaf).__name__}, which may last from step to step")
    return ConditioningLayout(tree, tuple(leaves), len(loop_inputs.values)), rows, sizes


def pad_rows(rows: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of a prompt, padded to the shapes of the longest prompt's."""
    return [pad_to(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def place_samples(values: dict[str, Any], x: Tensor, streams: Sequence[LoopStream]) -> dict[str, Any]:
    """Return the inputs of a step with a sample `[n]` in its streams."""
    for stream, part in zip(streams, x.split([len(stream.elements) for stream in streams]), strict=True):
        values[stream.field] = stream.scatter(part, values[stream.field])
    return values


def _remove_samples(values: Mapping[str, Any], streams: Sequence[LoopStream]) -> dict[str, Any]:
    """Return values with zeros in place of samples; None for a value that consists of samples alone."""
    removed = dict(values)
    for name in {stream.field for stream in streams}:
        index = torch.cat([stream.elements for stream in streams if stream.field == name])
        value = removed[name]
        others = value.flatten().index_fill(0, index, 0).reshape(value.shape)
        removed[name] = None if len(index) == value.numel() else others
    return removed


def _matches(one: Any, other: Any) -> bool:
    kinds = (type, PromptTensor, RepeatedLeaf)
    if isinstance(one, kinds) or isinstance(other, kinds):
        return bool(one == other)
    if is_scheduler(one) or isinstance(one, torch.Generator):
        return type(one) is type(other)
    return _is_same(one, other)


def _is_same(one: Any, other: Any) -> bool:
    return bool(type(one) is type(other) and (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other))
