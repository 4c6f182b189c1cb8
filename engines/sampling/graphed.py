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
        self._graphs: dict[Any, tuple[list[Tensor], Callable[[], None], Tensor]] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: PyTree[Tensor]) -> Tensor:
        """Return function(*inputs).

        Args:
            function: what is called; for inputs of a form that was seen before, it must launch what the one before did.
        """
        leaves, tree = optree.tree_flatten(inputs)
        form = tree, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if form not in self._graphs:
            held = [leaf.clone() for leaf in leaves]  # whose values the host does not know
            self._graphs[form] = held, *capture(partial(function, *optree.tree_unflatten(tree, held)))
        held, launch, result = self._graphs[form]
        torch._foreach_copy_(held, leaves)
        launch()
        return result.clone()


def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Return what launches the kernels of function() again, and where its result lies then.

    The function runs once before, so that libraries are set up, blocks compiled and kernels tuned.

    Raises:
        UsageError: it cannot be captured, as it reads a value on the host, for example.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError as error:
        hint = f"a pass of the network cannot be captured: {str(error).splitlines()[0]}"
        raise UsageError("engine.compile", "reduce-overhead", "True", hint) from error
    return graph.replay, result
