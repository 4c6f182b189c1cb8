"""Gather maps: which element of a transformer's input, or of a velocity, is which element of another tensor.

A pipeline may give its transformer the sample among numbers of an image: joined along channels or tokens, packed, masked.
Each element of such an input is an element of the sample or a number of the condition, and the sample's are found by their
values, which several samples of random noise tell apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 0.5  # part of the sample that an input which holds it has; a first frame may be replaced by an image

# Weights of the samples in a sum that tells elements apart which are equal in one sample.
WEIGHTS = (1.0, 3.14159265358979, 2.71828182845905, 1.41421356237310)


@dataclass(frozen=True, eq=False)
class Places:
    """Elements of another tensor that a tensor consists of.

    Args:
        index: element of the other tensor's flat rows, `[n]` int64.
        shape: shape of one row of the tensor, of n elements.
    """

    index: Tensor
    shape: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and self.shape == other.shape and torch.equal(self.index, other.index)

    def __hash__(self) -> int:
        return hash(self.shape)

    def gather(self, rows: Tensor) -> Tensor:
        """Return the tensor `[..., *shape]` from flat rows `[..., m]`, differentiable."""
        return rows.index_select(-1, self.index.to(rows.device)).unflatten(-1, self.shape)


class Whole(NamedTuple):
    """Flat samples of several pieces among all that the transformer is given in their place, as behind a held frame.

    Its outputs are as large as these inputs, and guidance may be rescaled by the deviation of all that is in them.
    """

    inputs: tuple[int, ...]  # index, among the inputs that hold the sample, of the one that each output is the velocity of
    at: tuple[Places, ...]  # elements of each output that are the sample's

    def join(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the inputs that hold the sample, each `[B, ...]`, in the order of the outputs, `[B, m]`."""
        return torch.cat([inputs[number].flatten(1) for number in self.inputs], dim=1)


def locate(want: Tensor, have: Tensor) -> Tensor:
    """Return for each element of `want` `[B, n]` the element of `have` `[B, m]` with its values in all rows, or -1.

    If several have them, which low precision makes likely, the one nearest to the place after the last element's is taken.
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
    """Return elements of a sample, -1 for others, without those that are another's by coincidence, as one sample has some.

    They are found twice: beside others of the sample, and alone among other numbers.
    """
    inside = place >= 0
    beside = (inside.roll(1) | inside.roll(-1)) & inside
    twice = torch.isin(place, place[beside])
    return torch.where(inside & ~beside & twice, -1, place)


def find_in_input(leaf: object, x: Tensor, known: Sequence[Places] = ()) -> tuple[Places, Tensor] | None:
    """Return where an input has the sample, and its other numbers; None if it does not hold the sample.

    Args:
        leaf: input of the transformer.
        x: samples `[B, *event]` of n elements each.
        known: places to expect in inputs of their shape, which are verified and not searched for: in low precision one
            sample alone has elements of equal values.

    Returns:
        (places in the sample's n elements followed by the others, the others `[B, repeats, m]`).
    """
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim < 2 or not len(leaf) or len(leaf) % len(x):
        return None
    flat, rows = x.to(leaf.dtype).flatten(1), leaf.detach().flatten(1).unflatten(0, (-1, len(x)))
    # A flat sample has several pieces; an input holds one of them.
    least = LEAST * (flat.shape[1] if x.ndim > 2 else min(flat.shape[1], rows.shape[-1]))
    if rows.shape[-1] < least:
        return None
    expected = [places.index for places in known if places.shape == leaf.shape[1:]]
    for index in expected or [drop_coincidences(locate(rows[0], flat))]:
        inside = (index >= 0) & (index < flat.shape[1])
        inner = flat[:, index[inside].to(flat.device)]
        if len(index[inside].unique()) < max(least, 1) or any(
            not torch.equal(each[:, inside.to(each.device)], inner) for each in rows
        ):
            continue
        place = index.clone()
        place[~inside] = flat.shape[1] + torch.arange(int((~inside).sum()))
        return Places(place, tuple(leaf.shape[1:])), rows[..., (~inside).to(rows.device)].transpose(0, 1)
    return None


def blocks(shape: Sequence[int], event: Sequence[int]) -> Iterator[Places]:
    """Yield the places of a sample that is one block of an input along an axis, such as its first channels.

    Args:
        shape, event: of the input and of the sample, without the batch.
    """
    numbers = torch.arange(math.prod(event)).reshape(*event)
    for axis in range(len(event)):
        if len(shape) == len(event) and (*shape[:axis], *shape[axis + 1 :]) == (*event[:axis], *event[axis + 1 :]):
            for first in range(shape[axis] - event[axis] + 1):
                index = torch.full((*shape,), -1)
                index.narrow(axis, first, event[axis]).copy_(numbers)
                yield Places(index.flatten(), tuple(shape))


def find_in_output(v: Tensor, output: Tensor) -> Places | None:
    """Return the elements of an output `[B, ...]` that a velocity `[B, *event]` consists of; None if it has others."""
    if len(v) != len(output) or v.dtype != output.dtype:
        return None
    place = locate(v.flatten(1), output.flatten(1))
    return Places(place, tuple(v.shape[1:])) if bool((place >= 0).all()) else None


def find_whole(inputs: Sequence[Places], outputs: Sequence[Tensor], count: int) -> Whole | None:
    """Return what of larger outputs is a flat sample of several pieces; None where they are no larger, or it is not found.

    Args:
        inputs: where each input that holds the sample has it.
        outputs: output for each piece, `[B, ...]`, of the shape of the input that it is the velocity of.
        count: elements of the sample.
    """
    if sum(output[0].numel() for output in outputs) <= count:
        return None
    order, at, first = list[int](), list[Places](), 0
    for output in outputs:
        alike = [number for number, places in enumerate(inputs) if places.shape == output.shape[1:] and number not in order]
        if not alike:
            return None
        order.append(alike[0])
        index = inputs[alike[0]].index
        kept_index = torch.nonzero(index < count).flatten()
        kept_index = kept_index[index[kept_index].argsort()]  # in the sample's order
        if not torch.equal(index[kept_index], torch.arange(first, first + len(kept_index))):
            return None
        at.append(Places(kept_index, (len(kept_index),)))
        first += len(kept_index)
    return Whole(tuple(order), tuple(at)) if first == count else None
