"""Dispatch mode of a simulation: host tensors are real, tensors on the simulated device are fake, and all costs are noted.

Only one rank runs. Collectives on the host return results as if all ranks did the same.
"""

import sys
import sysconfig
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fluvial.engines.extensions.simulate.device import TYPE
from fluvial.engines.extensions.simulate.fake import FakeMode, ResultCache, propagate_values, read_value
from fluvial.engines.extensions.simulate.memory import Ledger

ROOT = str(Path(__file__).parents[3])
PACKAGES = sysconfig.get_paths()["purelib"]
HERE = str(Path(__file__).parent)
PASSING = ("models/flops.py", "core/checks.py", "models/pipelines/unfilled.py")  # their callers are named instead
# Parts of PyTorch that are named, because they hold memory or wait by themselves.
SPEAKING = ("torch/distributed/fsdp/", "torch/optim/", "torch/utils/checkpoint.py")


@cache
def _name_file(file: str) -> tuple[str, bool] | None:
    """Return the name of a file, and whether it belongs to fluvial; None for a file that only passes calls on."""
    if file.startswith((HERE, "<")) or file.endswith(PASSING):
        return None
    inside = file.removeprefix(f"{ROOT}/")
    if inside != file and inside.split("/")[0] in ("core", "kernels", "models", "engines", "bench", "tests"):
        return inside, True
    name = file.rpartition("site-packages/")[2] if "site-packages/" in file else file
    if name.startswith("torch/"):
        return (f"torch: {Path(name).name}", False) if name.startswith(SPEAKING) else None
    if "/lib/python" in name or name.startswith(("optree/", "einops/", "jaxtyping/", "beartype/", "accelerate/")):
        return None
    return "/".join(Path(name).parts[-2:]), False


def find_line(depth: int = 2) -> str:
    """Return the innermost line outside of PyTorch, and the innermost line of fluvial with its function.

    For example "attention.py:31 < models/pipelines/sd3.py:90 predict".
    """
    frame, inner = sys._getframe(depth), ""
    while frame is not None:
        named = _name_file(frame.f_code.co_filename)
        if named is not None:
            name, is_ours = named
            line = f"{name}:{frame.f_lineno}"
            if is_ours:
                line += f" {frame.f_code.co_qualname.replace('.<locals>', '')}"
                return f"{inner} < {line}" if inner else line
            inner = inner or line
        frame = frame.f_back  # type: ignore[assignment]
    return inner


PLAIN = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
SILENT = ("wait_tensor", "barrier")


class CollectiveCall(NamedTuple):
    """Collective."""

    name: str  # all_gather, reduce_scatter, all_reduce, all_to_all or broadcast
    sent: int  # bytes sent by each rank
    ranks: int


def describe_call(function: Any, args: tuple, kwargs: dict[str, Any]) -> CollectiveCall | None:
    """Return the cost of a collective; None if it has a single rank or sends nothing."""
    name = function._schema.name.partition("::")[2]
    ranks = _count_ranks(args, kwargs)
    if ranks == 1 or any(word in name for word in SILENT):
        return None
    largest = max((tensor.nbytes for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)), default=0)
    if name in ("allgather_", "all_gather_into_tensor"):
        largest *= ranks  # each argument belongs to one rank
    # In a ring of n ranks, a rank sends (n - 1) / n of the bytes of the largest tensor, twice that for an all-reduce.
    plain = next((plain for plain in PLAIN if plain.replace("_", "") in name.replace("_", "")), name)
    return CollectiveCall(plain, (2 if plain == "all_reduce" else 1) * largest * (ranks - 1) // ranks, ranks)


def _count_ranks(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the number of ranks of the group among the arguments."""
    for value in (*args, *kwargs.values()):
        with suppress(RuntimeError, TypeError, ValueError):  # the operation of a reduction is also an object or a name
            if isinstance(value, torch.ScriptObject):
                return int(dist.ProcessGroup.unbox(value).size())
            if isinstance(value, str):
                return int(dist.distributed_c10d._resolve_process_group(GroupName(value)).size())
    return 1


def gather_known_values(function: Any, args: tuple) -> None:
    """Set the values of the results of a gather on the device, if those of its input are known."""
    name = function._schema.name
    if name == "c10d::allgather_":
        for output, source in zip(args[0], args[1], strict=True):
            if (value := getattr(source, "fluvial_value", None)) is not None:
                for each in output:
                    each.fluvial_value = value
    if name not in ("c10d::_allgather_base_", "c10d::alltoall_base_"):
        return
    if (value := getattr(args[1], "fluvial_value", None)) is not None:
        result = torch.empty(args[0].shape, dtype=args[0].dtype)
        emulate_collective(function, (result, value))
        args[0].fluvial_value = result


def emulate_collective(function: Any, args: tuple) -> None:
    """Write the results of a collective on host tensors, as if every rank had passed the tensors of this one."""
    name = function._schema.name.partition("::")[2]
    if name == "allgather_":
        for output, source in zip(args[0], args[1], strict=True):
            for each in output:
                each.copy_(source)
    elif name == "_allgather_base_":
        args[0].view(-1).copy_(args[1].reshape(-1).repeat(args[0].numel() // args[1].numel()))
    elif name == "alltoall_base_":
        output, source = args[0], args[1]
        if len(source):  # the received rows are copies of the sent ones
            output.copy_(source[torch.arange(len(output)) % len(source)])
        else:
            output.zero_()
    elif name == "allreduce_":
        for tensor in args[0]:
            tensor.mul_(_count_ranks(args[1:], {}))


aten, prim = torch.ops.aten, torch.ops.prim
# Floating-point or pinned host tensors of this many bytes are fake too: those of offload="always" or "blocks".
LARGE = 2**24


class Wait(NamedTuple):
    """Wait of the host for the device, or copy to it."""

    phase: str
    kind: str  # read, copy to the device, or synchronisation
    operation: str
    line: str


class Traffic(NamedTuple):
    """Collectives of one kind in a phase."""

    phase: str
    name: str
    ranks: int
    line: str


class SimulatedMode(TorchDispatchMode):
    """Mode that runs a program without its device. Every thread enters the same mode, see `simulation.simulate`.

    Attributes:
        ledger: memory of the device.
        host: memory of the large host tensors, which are fake.
        waits: number of waits of the host, by kind and line.
        calls, sent: number of collectives, and bytes sent by each rank, by kind.
        flops: floating-point operations by phase, including those repeated by activation checkpointing.
        operations: number of operations on the device by phase.
        copied: bytes copied from the host to the device by phase.
        phase: name of the current phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeMode(allow_non_fake_inputs=True)
        self._results = ResultCache(self.fake)
        self.ledger, self.host = Ledger(), Ledger()
        self.waits: Counter[Wait] = Counter()
        self.calls: Counter[Traffic] = Counter()
        self.sent: Counter[Traffic] = Counter()
        self.flops: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.phase = ""
        self._lock = threading.RLock()

    def __enter__(self) -> "SimulatedMode":
        # torch.tensor(..., device=) creates its values on the host, as for a GPU; PyTorch keeps this flag per thread.
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors are dispatched here again
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor infers shapes
        with self._lock:
            return self._run(func, args, kwargs)

    def note(self, kind: str, operation: str) -> None:
        """Note a wait of the host."""
        self.waits[Wait(self.phase, kind, operation, find_line(3))] += 1

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        leaves = [leaf for leaf in optree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if name.startswith(("c10d::", "_c10d_functional")):
            return self._run_collective(func, args, kwargs, fake=fake)
        if func.overloadpacket in (aten.is_pinned, aten._pin_memory) and leaves[0].device.type == "cpu":
            return fake if func.overloadpacket is aten.is_pinned else leaves[0] if fake else _pin(leaves[0])
        if not fake and (device := kwargs.get("device")) is not None and torch.device(device).type == TYPE:
            fake = True
        if not fake:
            return self._run_on_host(func, args, kwargs, leaves)
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None and (done := handler(self, func, args, kwargs)) is not NotImplemented:
            return done
        return self._compute(func, args, kwargs)

    def _run_on_host(self, func: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Tensor]) -> Any:
        """Run an operation on the host; a large result is fake."""
        if pinned := bool(kwargs.get("pin_memory")):
            kwargs = {**kwargs, "pin_memory": False}
        if func in (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.zeros.default):
            meta = func(*args, **{**kwargs, "device": "meta"})
            device = kwargs.get("device") or (leaves[0].device if leaves else "cpu")
            if meta.nbytes >= LARGE and (meta.is_floating_point() or pinned) and torch.device(device).type == "cpu":
                return self._compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation, without values."""
        out, flops = self._results.run(func, args, kwargs)
        results = [leaf for leaf in optree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        propagate_values(func, args, kwargs, results)
        self.operations[self.phase] += 1
        self.flops[self.phase] += flops
        self._count(func, results)
        return out

    def _count(self, func: Any, results: list[FakeTensor]) -> None:
        """Enter the storages of results in the ledger."""
        line = ""
        for tensor in results:
            kind = tensor.fake_device.type
            if kind not in (TYPE, "cpu"):
                continue
            ledger, storage = self.ledger if kind == TYPE else self.host, tensor.untyped_storage()
            if not ledger.is_known(storage):
                line = line or find_line(4) or f"backward, {func._schema.name.partition('::')[2]}"
                ledger.add(storage, line)

    def _run_collective(self, func: Any, args: tuple, kwargs: dict[str, Any], *, fake: bool) -> Any:
        call = describe_call(func, args, kwargs)
        if call is not None:
            kind = Traffic(self.phase, call.name, call.ranks, find_line(4))
            self.calls[kind] += 1
            self.sent[kind] += call.sent
        with self.fake if fake else nullcontext():
            out = func(*args, **kwargs)
        if fake:
            self._count(func, [leaf for leaf in optree.tree_leaves(out) if isinstance(leaf, FakeTensor)])
            gather_known_values(func, args)
        else:
            emulate_collective(func, args)
        return out

    # Operations that need more than a shape. A handler that returns NotImplemented leaves the operation to `_compute`.

    def _read(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == TYPE:
            self.note("read", func._schema.name.partition("::")[2])
        value = read_value(tensor)
        if value is not None:
            return value.item()
        return False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0

    def _compare(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        self.note("read", "equal")
        first, second = read_value(args[0]), read_value(args[1])
        return True if first is None or second is None else torch.equal(first, second)

    def _find_true(self, mask: Tensor, operation: str) -> Tensor:
        """Return the indices at which a mask is true, `[N, dimensions]`; all indices if its values are unknown."""
        self.note("read", operation)
        value = read_value(mask)
        count = mask.numel() if value is None else int(value.count_nonzero())
        options = {"dtype": torch.int64, "device": mask.device}
        out: Tensor = self._compute(aten.empty.memory_format, ([count, mask.dim()],), options)
        if value is not None:
            out.fluvial_value = value.nonzero()  # type: ignore[attr-defined]
        return out

    def _to_copy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        source, device = args[0], kwargs.get("device")
        target = source.device if device is None else torch.device(device)
        if source.device.type == target.type:
            return NotImplemented
        if target.type == "meta":
            dtype = kwargs.get("dtype") or source.dtype
            return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
        blocks = not kwargs.get("non_blocking", False)
        self._note_copy(source.device.type, target.type, source.nbytes, blocks=blocks, operation="to")
        options: dict[str, Any] = {"dtype": kwargs.get("dtype") or source.dtype, "device": target}
        value = read_value(source)
        if target.type == "cpu":
            if value is not None:
                return value.to(options["dtype"]).clone()
            return self._run_on_host(aten.zeros.default, (list(source.shape),), options, [])
        out = self._compute(aten.empty_like.default, (source,), options)
        if value is not None:
            out.fluvial_value = value.to(options["dtype"]).clone()
        return out

    def _copy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.device.type == source.device.type:
            return NotImplemented
        self._note_copy(source.device.type, target.device.type, source.nbytes, blocks=blocks, operation="copy_")
        if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
            raise RuntimeError(f"copy_: a tensor of shape {list(source.shape)} does not fit into {list(target.shape)}")
        if isinstance(target, FakeTensor):
            propagate_values(func, args, kwargs, [target])
        return target

    def _note_copy(self, source: str, target: str, size: int, *, blocks: bool, operation: str) -> None:
        """Note a copy of `size` bytes between host and device."""
        if target == TYPE:
            self.copied[self.phase] += size
            self.note("blocking copy to the device" if blocks else "copy to the device", operation)
        elif source == TYPE and target == "cpu":
            self.note("read" if blocks else "copy to the host", operation)

    def _index(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != TYPE:
            return NotImplemented
        indices: list[Tensor | None] = []
        for each in args[1]:
            if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                indices += self._compute(aten.unbind.int, (self._find_true(each, "index by a mask"), 1), {})
            else:
                if isinstance(each, Tensor) and each.device.type == "cpu":
                    self.note("blocking copy to the device", "index by a host tensor")
                indices.append(each)
        return self._compute(func, (args[0], indices, *args[2:]), kwargs)

    def _select_masked(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        number = len(self._find_true(args[1], "masked_select"))
        return self._compute(aten.empty.memory_format, ([number],), {"dtype": args[0].dtype, "device": args[0].device})

    def _repeat(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is not aten.repeat_interleave.Tensor or kwargs.get("output_size") is not None:
            return NotImplemented
        self.note("read", "repeat_interleave")
        value = read_value(args[0])
        length = args[0].shape[0] if value is None else int(value.sum())
        return self._compute(func, args, {**kwargs, "output_size": length})


def _pin(tensor: Tensor) -> Tensor:
    """Return a copy of a host tensor with its strides, as CUDA returns one in pinned memory; fake ones count as pinned."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


_HANDLERS: dict[Any, Any] = {
    aten._local_scalar_dense: SimulatedMode._read,
    aten.item: SimulatedMode._read,
    aten.equal: SimulatedMode._compare,
    aten.nonzero: lambda mode, func, args, kwargs: mode._find_true(args[0], "nonzero"),
    aten._to_copy: SimulatedMode._to_copy,
    aten.copy_: SimulatedMode._copy,
    aten.index: SimulatedMode._index,
    aten.index_put_: SimulatedMode._index,
    aten.masked_select: SimulatedMode._select_masked,
    aten.repeat_interleave: SimulatedMode._repeat,
    aten.record_stream: lambda *_: None,
    aten.is_pinned: lambda *_: False,
}
