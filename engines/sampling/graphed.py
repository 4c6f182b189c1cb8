"""Forward passes as CUDA graphs: one launch per pass, for kernels that run shorter than their launches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.engines.errors import UsageError


class GraphedPass:
    """Captures a function at its first call and replays it, one graph per structure, shapes and dtypes of the inputs.

    Inputs are copied into the captured ones, and the result out of the captured one. The kernels, and so the bits, are the
    same. Other tensors that the function reads, such as weights, must keep their addresses while the object lives.

    Memory: the function's peak memory, per graph.
    """

    def __init__(self) -> None:
        self._graphs: dict[Any, tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: PyTree[Tensor], **named: PyTree[Tensor]) -> Tensor:
        """Return function(*inputs, **named), which must launch the same kernels for all inputs of the same shapes.

        Raises:
            UsageError: the function cannot be captured, e.g. because it reads a value on the host.
        """
        leaves, tree = optree.tree_flatten((inputs, named))
        form = tree, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if form not in self._graphs:
            captured = [leaf.clone() for leaf in leaves]  # clones have no values on the host
            positional, keywords = optree.tree_unflatten(tree, captured)
            self._graphs[form] = captured, *_capture(partial(function, *positional, **keywords))
        captured, graph, result = self._graphs[form]
        torch._foreach_copy_(captured, leaves)
        graph.replay()
        return result.clone()


def _capture(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a function after a warm-up call (libraries, compiled blocks); return the graph and its output tensor."""
    function()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            return graph, function()
    except RuntimeError as error:
        hint = f"a pass of the network cannot be captured: {str(error).splitlines()[0]}"
        raise UsageError("engine.compile", "reduce-overhead", "True", hint) from error
