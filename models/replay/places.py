"""Gather maps: which element of a transformer's input, or of a velocity, is which element of another tensor.

A pipeline may give its transformer the sample among numbers of an image: joined along channels or tokens, packed, masked.
Each element of such an input is an element of the sample or a number of the condition, and the sample's are found by their
values, which several samples of random noise tell apart.
"""

from dataclasses import dataclass

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


def places_in_input(leaf: object, x: Tensor) -> tuple[Places, Tensor] | None:
    """Return where an input has the sample, and its other numbers; None if it does not hold the sample.

    Args:
        leaf: input of the transformer.
        x: samples `[B, *event]` of n elements each.

    Returns:
        (places in the sample's n elements followed by the others, the others `[B, repeats, m]`).
    """
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim < 2 or not len(leaf) or len(leaf) % len(x):
        return None
    flat, rows = x.to(leaf.dtype).flatten(1), leaf.detach().flatten(1).unflatten(0, (-1, len(x)))
    # A flat sample is one of several pieces, of which an input holds one.
    least = LEAST * (flat.shape[1] if x.ndim > 2 else min(flat.shape[1], rows.shape[-1]))
    if rows.shape[-1] < least:
        return None
    place = locate(rows[0], flat)
    inside = place >= 0
    if len(place[inside].unique()) < max(least, 1):
        return None
    expected = flat[:, place[inside].to(flat.device)]
    if any(not torch.equal(each[:, inside.to(each.device)], expected) for each in rows):
        return None
    place[~inside] = flat.shape[1] + torch.arange(int((~inside).sum()))
    return Places(place, tuple(leaf.shape[1:])), rows[..., (~inside).to(rows.device)].transpose(0, 1)


def places_in_output(v: Tensor, output: Tensor) -> Places | None:
    """Return the elements of an output `[B, ...]` that a velocity `[B, *event]` consists of; None if it has others."""
    if len(v) != len(output) or v.dtype != output.dtype:
        return None
    place = locate(v.flatten(1), output.flatten(1))
    return Places(place, tuple(v.shape[1:])) if bool((place >= 0).all()) else None
