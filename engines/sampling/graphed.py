"""Passes of a network as CUDA graphs: where kernels take less time than their launches, one launch for all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.engines.errors import UsageError


class GraphedPass:
    """Repeats the launches of a function's first call, one graph for each form of its inputs.

    Inputs are copied to those of the first call, and the result from where that one lay. The kernels are the same, and so
    are the bits. Whatever else the function reads, such as weights, must stay at its address as long as the object lives.

    Memory: what the function takes while it runs, of each graph.
    """

    def __init__(self) -> None:
        self._graphs: dict[Any, tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: PyTree[Tensor], **named: PyTree[Tensor]) -> Tensor:
        """Return function(*inputs, **named), which launches the same kernels for all inputs of one form.

        Raises:
            UsageError: it cannot be captured, as it reads a value on the host, for example.
        """
        leaves, tree = optree.tree_flatten((inputs, named))
        form = tree, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if form not in self._graphs:
            held = [leaf.clone() for leaf in leaves]  # whose values the host does not know
            positional, keywords = optree.tree_unflatten(tree, held)
            self._graphs[form] = held, *_capture(partial(function, *positional, **keywords))
        held, graph, result = self._graphs[form]
        torch._foreach_copy_(held, leaves)
        graph.replay()
        return result.clone()


def _capture(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return the graph of a function, and where its result lies; a call before sets up libraries and compiles blocks."""
    function()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            return graph, function()
    except RuntimeError as error:
        hint = f"a pass of the network cannot be captured: {str(error).splitlines()[0]}"
        raise UsageError("engine.compile", "reduce-overhead", "True", hint) from error
