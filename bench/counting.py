"""Exact counts, on any device, of what slows an update down: collectives, and reads that make the host wait."""

from collections import Counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Operations that make the host wait for their result or its size. `x[mask]` is one too, see `_makes_host_wait`.
WAITING = {
    aten._local_scalar_dense,  # item(), bool(), float(), int() and every other use of a tensor as a number
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten._unique2,
}
# Operations in the collectives' namespaces without communication.
LOCAL = {"wait_tensor", "_wrap_tensor_autograd"}
# Methods that copy numbers to the host. On CPU tensors they dispatch no operation, so their calls are counted.
READING = {"tolist", "numpy", "cpu", "__array__"}


class Collectives(TorchDispatchMode):
    """Counter of collectives by operation, in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def all_gathers(self) -> int:
        """All-gathers of parameters; those of small tensors have another name."""
        return self.counts["_allgather_base_"]

    @property
    def reduce_scatters(self) -> int:
        """Reduce-scatters of gradients."""
        return self.counts["_reduce_scatter_base_"]

    @property
    def others(self) -> int:
        """Everything else: metrics, norms, barriers."""
        return self.counts.total() - self.all_gathers - self.reduce_scatters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it returns here as operations on local tensors
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in LOCAL:
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """Counter of reads for which the host waits for an accelerator's queue, by name, in `counts`.

    On a CPU nothing waits, and reads that would wait on an accelerator are counted. Reads that dispatch no operation there
    (`tolist`, `numpy`, `cpu`) are counted by their calls. `to("cpu")` is counted only if it copies from an accelerator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls, self.inside_call = _Calls(self), False

    @property
    def total(self) -> int:
        """All reads."""
        return self.counts.total()

    def __enter__(self) -> Self:
        self.calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.calls.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self.inside_call and _makes_host_wait(func, args, result):
            self.counts[func.overloadpacket.__name__] += 1
        return result


class _Calls(TorchFunctionMode):
    """Counter of calls of methods that copy numbers to the host."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")  # properties of tensors come as slots, some without a name
        if name not in READING or self.reads.inside_call:
            return func(*args, **(kwargs or {}))
        self.reads.counts[name] += 1
        self.reads.inside_call = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.reads.inside_call = False


def _makes_host_wait(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    operation = func.overloadpacket
    if operation in (aten.index, aten.index_put, aten.index_put_):  # the size of x[mask] is known when the mask is
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if operation in (aten._to_copy, aten.copy_):
        source = args[1] if operation is aten.copy_ else args[0]
        return isinstance(result, Tensor) and result.device.type == "cpu" and source.device.type != "cpu"
    return operation in WAITING
