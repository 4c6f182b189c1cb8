"""Recipes of a step: the calls of the pipeline's networks, the sources of their inputs, and the velocity's combination."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.replay.combinations import Combination, Combined, JoinedPieces, cut_leading_tokens
from fluvial.models.replay.gather_maps import GatherMap

CONTROL = ("controlnet",)  # parts whose outputs are inputs of the transformer


class SampleInput(NamedTuple):
    """An input that consists of the sample: cast, and repeated along the batch for guidance."""

    dtype: torch.dtype
    repeats: int


class MixedInput(NamedTuple):
    """An input that holds the sample, cast, among other numbers, which are the `RowInput` after it."""

    dtype: torch.dtype
    repeats: int
    gather_map: GatherMap  # indexes the elements of the sample followed by the other numbers


class RowInput(NamedTuple):
    """An input with one row per sample, repeated along the batch for guidance.

    With 0 repeats it has no batch dimension: each forward pass has one sample, whose prompt it belongs to.
    """

    repeats: int
    each_step: bool  # whether it differs from step to step


class SharedInput(NamedTuple):
    """An input that all samples and steps share, tensor or not."""

    value: Any


class ControlOutput(NamedTuple):
    """An input that a control network returned in the same step, cast."""

    dtype: torch.dtype
    call: int  # index of the control network's call among those of the step
    output: int  # index of the tensor among those that it returned


InputSource = SampleInput | MixedInput | RowInput | SharedInput | ControlOutput


class StackedList(NamedTuple):
    """A list with one tensor per sample, as Z-Image takes: the stacks of each copy of the batch, `[B, ...]`."""

    stacks: tuple[Tensor, ...]


class Call(NamedTuple):
    """One call of a network: the source of each input, as leaves of the pytree (args, kwargs)."""

    component: str  # part of the pipeline that is called
    tree: Any  # an optree.PyTreeSpec; lists with one tensor per sample are `StackedList`
    leaves: tuple[InputSource, ...]  # a MixedInput is followed by the RowInput of its other numbers
    dtype: torch.dtype  # of the output


@dataclass(frozen=True)
class StepRecipe:
    """Calls and combination that give the velocity of one or more recorded steps."""

    calls: tuple[Call, ...]
    combination: Combined
    positions: tuple[int, ...]  # indices of the steps among the recorded ones

    def predict(
        self,
        module: nn.Module,
        x: Tensor,
        rows: Sequence[Tensor],
        position: Tensor,
        level: Tensor,
        frozen: Mapping[str, nn.Module],
    ) -> Tensor:
        """Return the velocity of P pairs of a sample and a step.

        Args:
            module: the transformer.
            x: samples, `[P, *event]`.
            rows: inputs with one row per sample, `[P, repeats, ...]`, or `[P, S, repeats, ...]` if they differ by step.
            position: index of each pair's step among the S steps, `[P]` int64.
            level: noise level of each pair, `[P]`.
            frozen: networks beside the transformer, by the names of the pipeline's parts.
        """
        values, pairs, parts = iter(rows), torch.arange(len(x), device=x.device), list[Tensor]()
        outputs = list[list[Tensor]]()  # by call
        mixed = list[Tensor]()  # inputs that hold the sample
        for call in self.calls:
            leaves = []
            sources = iter(call.leaves)
            for leaf in sources:
                if isinstance(leaf, SampleInput):
                    leaves.append(x.to(leaf.dtype).repeat(leaf.repeats, *[1] * (x.ndim - 1)))
                elif isinstance(leaf, MixedInput | RowInput):
                    row = next(sources) if isinstance(leaf, MixedInput) else leaf
                    value = next(values)
                    value = value[pairs, position] if isinstance(row, RowInput) and row.each_step else value
                    if isinstance(leaf, MixedInput):
                        sample = x.to(leaf.dtype).flatten(1)[:, None].expand(-1, leaf.repeats, -1)
                        value = leaf.gather_map.gather(torch.cat([sample, value], dim=-1))
                        mixed.append(value[:, 0])
                    leaves.append(value.transpose(0, 1).flatten(0, 1) if leaf.repeats else value[0])
                elif isinstance(leaf, ControlOutput):
                    leaves.append(outputs[leaf.call][leaf.output].to(leaf.dtype))
                else:
                    leaves.append(leaf.value.to(x.device) if isinstance(leaf.value, Tensor) else leaf.value)
            args, kwargs = unbind_lists(optree.tree_unflatten(call.tree, leaves))
            output = frozen.get(call.component, module)(*args, **kwargs)
            outputs.append(list_tensors(output))
            if call.component not in CONTROL:
                parts += split_parts(output, x)
        if isinstance(self.combination, JoinedPieces) and self.combination.whole is not None:
            return self.combination(parts, self.combination.whole.join(mixed).to(x.dtype), level)
        uncut = isinstance(self.combination, Combination) and (
            self.combination.first_half or self.combination.gather_map is not None
        )
        return self.combination(parts if uncut else cut_leading_tokens(parts, x), x, level)


def list_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a network's output."""
    return [leaf for leaf in optree.tree_leaves(_to_tuple(output)) if isinstance(leaf, Tensor)]


def _to_tuple(output: Any) -> Any:
    """Return an output of diffusers as a tuple."""
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def split_parts(output: Any, x: Tensor) -> list[Tensor]:
    """Return the transformer's outputs for each copy of a batch, `[B, ...]`; none if it does not return one per sample.

    If the samples x are flat, `[B, n]`, the outputs for their pieces are flattened and joined.
    """
    batch, first = len(x), output if isinstance(output, Tensor) else _to_tuple(output)[0]
    if x.ndim == 2 and isinstance(first, Tensor):
        first = torch.cat([tensor.flatten(1) for tensor in list_tensors(output)], dim=1)
    if not isinstance(first, Tensor):
        (first,) = stack_lists((first,), batch)
        return list(first.stacks) if isinstance(first, StackedList) else []
    copies, rest = divmod(len(first), batch)
    return list(first.chunk(copies)) if copies and not rest else []


def stack_lists(arguments: Any, batch: int) -> Any:
    """Return inputs in which each list of one or more tensors per sample is a `StackedList`."""

    def is_list(node: Any) -> bool:
        return isinstance(node, list) and bool(node) and all(isinstance(one, Tensor) for one in node)

    def stack(node: Any) -> Any:
        if not is_list(node) or len(node) % batch:
            return node
        copies = [node[first : first + batch] for first in range(0, len(node), batch)]
        if any(get_spec(one) != get_spec(copy[0]) for copy in copies for one in copy):
            return node
        return StackedList(tuple(torch.stack(copy) for copy in copies))

    return optree.tree_map(stack, arguments, is_leaf=is_list)


def unbind_lists(arguments: Any) -> Any:
    """Return inputs in which each `StackedList` is a list of one tensor per sample again."""

    def unbind(node: Any) -> Any:
        return [one for stack in node.stacks for one in stack.unbind()] if isinstance(node, StackedList) else node

    return optree.tree_map(unbind, arguments, is_leaf=lambda node: isinstance(node, StackedList))


def get_spec(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype."""
    return tensor.shape, tensor.dtype
