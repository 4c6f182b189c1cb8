"""Gather maps: the elements of another tensor that a transformer's input, or a velocity, consists of.

A pipeline may mix the sample with numbers of an image in its transformer's input: joined along channels or tokens, packed,
masked. Each element of such an input is an element of the sample or a number of the condition. The elements of the sample
are found by their values, which several samples of random noise tell apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 0.5  # least share of the sample's elements in an input that holds it; a first frame may be replaced by an image

# Weights of the samples in a sum that distinguishes elements that are equal in one sample.
WEIGHTS = (1.0, 3.14159265358979, 2.71828182845905, 1.41421356237310)


@dataclass(frozen=True, eq=False)
class GatherMap:
    """Map of a tensor whose elements are elements of another tensor.

    Args:
        index: elements of the other tensor's flat rows, `[n]` int64.
        shape: shape of one row of the tensor, of n elements.
    """

    index: Tensor
    shape: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GatherMap) and self.shape == other.shape and torch.equal(self.index, other.index)

    def __hash__(self) -> int:
        return hash(self.shape)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the tensor `[..., *shape]` from flat rows `[..., m]`, differentiable."""
        return rows.index_select(-1, self.index.to(rows.device)).unflatten(-1, self.shape)


class WholeInputs(NamedTuple):
    """Inputs that hold flat samples of several pieces among other elements, such as a given first frame.

    The transformer's outputs are as large as these inputs, and guidance may be rescaled by the deviation of all elements.
    """

    inputs: tuple[int, ...]  # for each output, the index of its input among the inputs that hold the sample
    maps: tuple[GatherMap, ...]  # for each output, the elements of the sample

    def join(self, inputs: Sequence[Tensor]) -> Tensor:
        """Join the inputs that hold the sample, each `[B, ...]`, in the order of the outputs, to `[B, m]`."""
        return torch.cat([inputs[number].flatten(1) for number in self.inputs], dim=1)


def locate_elements(want: Tensor, have: Tensor) -> Tensor:
    """Return for each element of `want` `[B, n]` the element of `have` `[B, m]` with its values in all rows, or -1.

    If several match, which is likely in low precision, take the one nearest to the successor of the previous element's.
    """
    want, have = want.detach().cpu(), have.detach().cpu().to(want.dtype)
    weights = torch.tensor([WEIGHTS[row % len(WEIGHTS)] ** (1 + row // len(WEIGHTS)) for row in range(len(want))])
    weights = weights.double()[:, None]
    values, order = (have.double() * weights).sum(0).sort(stable=True)
    keys = (want.double() * weights).sum(0).contiguous()
    first, last = torch.searchsorted(values, keys), torch.searchsorted(values, keys, right=True)
    place = order[first.clamp(max=len(values) - 1)]
    for element in torch.nonzero(last - first > 1).flatten().tolist():
        following = int(place[element - 1]) + 1 if element else 0
        candidates = order[first[element] : last[element]]
        place[element] = candidates[(candidates - following).abs().argmin()]
    return torch.where((have[:, place] == want).all(0), place, -1)


def drop_coincidences(place: Tensor) -> Tensor:
    """Return element indices with coincidental matches, which occur with a single sample, set to -1.

    A coincidence matches an element twice: beside other elements of the sample, and isolated among other numbers.
    """
    inside = place >= 0
    beside = (inside.roll(1) | inside.roll(-1)) & inside
    twice = torch.isin(place, place[beside])
    return torch.where(inside & ~beside & twice, -1, place)


def find_in_input(leaf: object, x: Tensor, known: Sequence[GatherMap] = ()) -> tuple[GatherMap, Tensor] | None:
    """Return the map of an input that holds the sample, and its other numbers; None if it does not hold the sample.

    Args:
        leaf: input of the transformer.
        x: samples `[B, *event]` of n elements each.
        known: maps to verify for inputs of their shape, in place of a search: in low precision a single sample has elements
            of equal values.

    Returns:
        (map over the sample's n elements followed by the others, the others `[B, repeats, m]`).
    """
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim < 2 or not len(leaf) or len(leaf) % len(x):
        return None
    flat, rows = x.to(leaf.dtype).flatten(1), leaf.detach().flatten(1).unflatten(0, (-1, len(x)))
    # A flat sample has several pieces; an input holds one of them.
    least = LEAST * (flat.shape[1] if x.ndim > 2 else min(flat.shape[1], rows.shape[-1]))
    if rows.shape[-1] < least:
        return None
    expected = [each.index for each in known if each.shape == leaf.shape[1:]]
    for index in expected or [drop_coincidences(locate_elements(rows[0], flat))]:
        inside = (index >= 0) & (index < flat.shape[1])
        inner = flat[:, index[inside].to(flat.device)]
        if len(index[inside].unique()) < max(least, 1) or any(
            not torch.equal(each[:, inside.to(each.device)], inner) for each in rows
        ):
            continue
        place = index.clone()
        place[~inside] = flat.shape[1] + torch.arange(int((~inside).sum()))
        return GatherMap(place, tuple(leaf.shape[1:])), rows[..., (~inside).to(rows.device)].transpose(0, 1)
    return None


def list_block_maps(shape: Sequence[int], event: Sequence[int]) -> Iterator[GatherMap]:
    """Yield the maps of inputs in which the sample is one block along an axis, such as the first channels.

    Args:
        shape, event: shapes of the input and of the sample, without the batch.
    """
    numbers = torch.arange(math.prod(event)).reshape(*event)
    for axis in range(len(event)):
        if len(shape) == len(event) and (*shape[:axis], *shape[axis + 1 :]) == (*event[:axis], *event[axis + 1 :]):
            for first in range(shape[axis] - event[axis] + 1):
                index = torch.full((*shape,), -1)
                index.narrow(axis, first, event[axis]).copy_(numbers)
                yield GatherMap(index.flatten(), tuple(shape))


def find_in_output(v: Tensor, output: Tensor) -> GatherMap | None:
    """Return the map of a velocity `[B, *event]` over an output `[B, ...]`; None if the velocity has other elements."""
    if len(v) != len(output) or v.dtype != output.dtype:
        return None
    place = locate_elements(v.flatten(1), output.flatten(1))
    return GatherMap(place, tuple(v.shape[1:])) if bool((place >= 0).all()) else None


def find_whole_inputs(inputs: Sequence[GatherMap], outputs: Sequence[Tensor], count: int) -> WholeInputs | None:
    """Return the elements of a flat sample of several pieces in larger outputs; None if outputs are no larger, or no match.

    Args:
        inputs: maps of the inputs that hold the sample.
        outputs: output for each piece, `[B, ...]`, of the shape of its input.
        count: elements of the sample.
    """
    if sum(output[0].numel() for output in outputs) <= count:
        return None
    order, maps, first = list[int](), list[GatherMap](), 0
    for output in outputs:
        matching = [number for number, each in enumerate(inputs) if each.shape == output.shape[1:] and number not in order]
        if not matching:
            return None
        order.append(matching[0])
        index = inputs[matching[0]].index
        kept_index = torch.nonzero(index < count).flatten()
        kept_index = kept_index[index[kept_index].argsort()]  # in the sample's order
        if not torch.equal(index[kept_index], torch.arange(first, first + len(kept_index))):
            return None
        maps.append(GatherMap(kept_index, (len(kept_index),)))
        first += len(kept_index)
    return WholeInputs(tuple(order), tuple(maps)) if first == count else None
