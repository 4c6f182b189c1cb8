"""Recipes of a step: the calls of the pipeline's networks, where their inputs come from, and what gives the velocity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.replay.places import Places

Norm = Literal["own", "kept", "capped"]


class Latent(NamedTuple):
    """An input that is the sample: cast, and repeated along the batch for guidance."""

    dtype: torch.dtype
    repeats: int


class Holds(NamedTuple):
    """An input that holds the sample, cast, among other numbers, which are the next row."""

    dtype: torch.dtype
    repeats: int
    places: Places  # in the elements of the sample followed by the other numbers


class Row(NamedTuple):
    """An input with one row per sample, repeated along the batch for guidance.

    With 0 repeats it has no dimension of the batch, and belongs to the prompt of the one sample that a pass has.
    """

    repeats: int
    each_step: bool  # whether it differs from step to step


class Fixed(NamedTuple):
    """An input that all samples and steps share, tensor or not."""

    value: Any


class Made(NamedTuple):
    """An input that a control network returned in the same step, cast."""

    dtype: torch.dtype
    call: int  # index of the control network's call among those of the step
    output: int  # index of the tensor among those that it returned


Leaf = Latent | Holds | Row | Fixed | Made


class Unbound(NamedTuple):
    """A list with one tensor per sample, as Z-Image takes: the stacks of each copy of the batch, `[B, ...]`."""

    stacks: tuple[Tensor, ...]


class Call(NamedTuple):
    """One call of a network: the source of each input, as leaves of the pytree (args, kwargs)."""

    component: str  # part of the pipeline that is called
    tree: Any  # an optree.PyTreeSpec; lists with one tensor per sample are `Unbound`
    leaves: tuple[Leaf, ...]  # a Holds is followed by the Row of its other numbers
    dtype: torch.dtype  # of the output


class Combination(NamedTuple):
    """A step's velocity as a function of one part, or of two with classifier-free guidance: c + g (c - u) or u + g (c - u).

    A part is the transformer's output for one copy of the batch; the parts of all calls are numbered in order.
    """

    cond: int | None = None  # index of c among two parts; None if there is one part
    scale: float = 1.0  # g
    from_cond: bool = False  # starts from c, as in Z-Image
    norm: Norm = "own"  # over the last dimension: that of c, as in Lumina 2; or at most that of c, as in LongCat-Image
    first_half: bool = False  # takes the first half of the channels; the other half is a learned variance
    negative: bool = False  # the transformer predicts x0 - eps
    dtype: torch.dtype | None = None  # dtype that the parts are cast to first
    places: Places | None = None  # elements of the output that the velocity consists of; None if it is the whole

    def __call__(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x."""
        if self.dtype is not None:
            parts = [part.to(self.dtype) for part in parts]
        v = parts[0]
        if self.cond is not None:
            c, u = parts[self.cond], parts[1 - self.cond]
            v = (c if self.from_cond else u) + self.scale * (c - u)
            wanted, made = (torch.norm(part, dim=-1, keepdim=True) for part in (c, v))
            if self.norm == "kept":
                v = v * (wanted / made)
            elif self.norm == "capped":
                v = v * (wanted / (made + 1e-8)).clamp(max=1.0)
        if self.first_half:
            v = v.chunk(2, dim=1)[0]
        if self.places is not None:
            v = self.places.gather(v.flatten(1))
        return -v if self.negative else v


class Fitted(NamedTuple):
    """A step's velocity as a weighted sum of parts and of the sample, fitted where no formula of `Combination` gives it."""

    weights: tuple[float, ...]  # of the parts
    of_sample: float
    dtype: torch.dtype  # of the velocity

    def __call__(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, ...]`, at samples x; the sum is taken in float64."""
        v = sum(weight * part.double() for weight, part in zip(self.weights, parts, strict=True))
        return (v + self.of_sample * x.double()).to(self.dtype)


class Joined(NamedTuple):
    """A step's velocity of flat samples of several pieces, e.g. a video and its sound, each with weights of its own."""

    sizes: tuple[int, ...]  # numbers of each piece
    sums: tuple[Fitted, ...]

    def __call__(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return the velocity of the parts, each `[B, n]`, at samples x."""
        pieces = zip(*(tensor.split(self.sizes, dim=1) for tensor in (*parts, x)), strict=True)
        return torch.cat([made(each[:-1], each[-1]) for made, each in zip(self.sums, pieces, strict=True)], dim=1)


@dataclass(frozen=True)
class StepRecipe:
    """Calls and combination that give the velocity of one or more recorded steps."""

    calls: tuple[Call, ...]
    combination: Combination | Fitted | Joined
    positions: tuple[int, ...]  # indices of the steps among the recorded ones

    def predict(
        self, module: nn.Module, x: Tensor, rows: Sequence[Tensor], place: Tensor, frozen: Mapping[str, nn.Module]
    ) -> Tensor:
        """Return the velocity of P pairs of a sample and a step.

        Args:
            module: the transformer.
            x: samples, `[P, *event]`.
            rows: inputs with one row per sample, `[P, repeats, ...]`, or `[P, S, repeats, ...]` if they differ by step.
            place: index of each pair's step among the S steps, `[P]` int64.
            frozen: control networks, by the names of the pipeline's parts.
        """
        values, pairs, parts, made = iter(rows), torch.arange(len(x), device=x.device), list[Tensor](), list[list[Tensor]]()
        for call in self.calls:
            leaves = []
            kinds = iter(call.leaves)
            for leaf in kinds:
                if isinstance(leaf, Latent):
                    leaves.append(x.to(leaf.dtype).repeat(leaf.repeats, *[1] * (x.ndim - 1)))
                elif isinstance(leaf, Holds | Row):
                    row = next(kinds) if isinstance(leaf, Holds) else leaf
                    value = next(values)
                    value = value[pairs, place] if isinstance(row, Row) and row.each_step else value
                    if isinstance(leaf, Holds):
                        sample = x.to(leaf.dtype).flatten(1)[:, None].expand(-1, leaf.repeats, -1)
                        value = leaf.places.gather(torch.cat([sample, value], dim=-1))
                    leaves.append(value.transpose(0, 1).flatten(0, 1) if leaf.repeats else value[0])
                elif isinstance(leaf, Made):
                    leaves.append(made[leaf.call][leaf.output].to(leaf.dtype))
                else:
                    leaves.append(leaf.value.to(x.device) if isinstance(leaf.value, Tensor) else leaf.value)
            args, kwargs = unbound(optree.tree_unflatten(call.tree, leaves))
            output = frozen.get(call.component, module)(*args, **kwargs)
            made.append(tensors_of(output))
            if call.component not in frozen:
                parts += parts_of(output, x)
        whole = isinstance(self.combination, Combination) and (
            self.combination.first_half or self.combination.places is not None
        )
        return self.combination(parts if whole else tails(parts, x), x)


def tails(parts: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Return parts of more tokens than the samples `[B, N, C]` without those that come first, as text in one sequence."""
    longer = (part.ndim == x.ndim == 3 and part.shape[2] == x.shape[2] and part.shape[1] > x.shape[1] for part in parts)
    return [part[:, -x.shape[1] :] if cut else part for part, cut in zip(parts, longer, strict=True)]


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a network's output."""
    return [leaf for leaf in optree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]


def _plain(output: Any) -> Any:
    """Return diffusers' output as a tuple."""
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def parts_of(output: Any, x: Tensor) -> list[Tensor]:
    """Return the transformer's outputs for each copy of a batch, `[B, ...]`; none if it does not return one per sample.

    If the samples x are flat, `[B, n]`, the outputs for their pieces are joined as they are.
    """
    batch, first = len(x), output if isinstance(output, Tensor) else _plain(output)[0]
    if x.ndim == 2 and isinstance(first, Tensor):
        first = torch.cat([tensor.flatten(1) for tensor in tensors_of(output)], dim=1)
    if not isinstance(first, Tensor):
        (first,) = stacked((first,), batch)
        return list(first.stacks) if isinstance(first, Unbound) else []
    copies, rest = divmod(len(first), batch)
    return list(first.chunk(copies)) if copies and not rest else []


def stacked(given: Any, batch: int) -> Any:
    """Return inputs whose lists with one tensor per sample, or several times so many, are `Unbound`."""

    def listed(node: Any) -> bool:
        return isinstance(node, list) and bool(node) and all(isinstance(one, Tensor) for one in node)

    def stack(node: Any) -> Any:
        if not listed(node) or len(node) % batch:
            return node
        copies = [node[first : first + batch] for first in range(0, len(node), batch)]
        if any(kind_of(one) != kind_of(copy[0]) for copy in copies for one in copy):
            return node
        return Unbound(tuple(torch.stack(copy) for copy in copies))

    return optree.tree_map(stack, given, is_leaf=listed)


def unbound(given: Any) -> Any:
    """Return inputs with lists of one tensor per sample, see `stacked`."""

    def unbind(node: Any) -> Any:
        return [one for stack in node.stacks for one in stack.unbind()] if isinstance(node, Unbound) else node

    return optree.tree_map(unbind, given, is_leaf=lambda node: isinstance(node, Unbound))


def kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
