"""CUDA graphs of a CPU: operations are recorded, and made again from the same tensors into the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from helpers.marks import Patch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluvial.bench.counting import HostReads


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, before in self.made:
            pairs = zip(optree.tree_leaves(before), optree.tree_leaves(func(*args, **kwargs)), strict=True)
            for old, new in pairs:
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Graphs:
    """Stand in for what `torch.cuda` has for graphs, and count them; reads of the host cannot be captured."""

    def __init__(self, patch: Patch) -> None:
        self.count = 0
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", self._capture)

    @contextmanager
    def _capture(self, graph: Graph) -> Iterator[None]:
        self.count += 1
        with HostReads() as reads, graph:
            yield
        if reads.total:
            raise RuntimeError(f"operation not permitted when stream is capturing: {dict(reads.counts)}")
