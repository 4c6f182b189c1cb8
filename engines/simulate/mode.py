"""The dispatch mode of a simulation: host tensors are real, those on the simulated device are fake, and all is noted."""

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from fluvial.engines.fsdp.flops import FORMULAS
from fluvial.engines.simulate import collectives
from fluvial.engines.simulate.device import TYPE
from fluvial.engines.simulate.memory import Ledger
from fluvial.engines.simulate.place import place

aten, prim = torch.ops.aten, torch.ops.prim
# Host tensors of this many bytes are fake as well: masters and moments that offload="always" keeps there.
LARGE = 2**24
# Values of so few numbers survive on the device, as long as they are only moved, cut and joined: rewards that are gathered.
FEW = 4096
NAMES = "cat stack view unsqueeze squeeze detach clone slice select expand alias _unsafe_view t transpose"
MOVES = {getattr(aten, name) for name in NAMES.split(" ")}


class Wait(NamedTuple):
    """The host waits for the device, or copies to it."""

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
    """Run a program without its device. Every thread enters the same mode, see `simulation.simulate`.

    Attributes:
        ledger: memory of the device.
        host: bytes of the host tensors that are fake, because they are large.
        waits: how often the host waits, by where.
        calls, sent: number of collectives, and bytes that each rank sends, by kind.
        flops: floating-point operations by phase, those that activation checkpointing repeats included.
        operations: number of operations on the device by phase.
        phase: name of the present phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = _FakeMode(allow_non_fake_inputs=True)
        self.ledger, self.host = Ledger(), Ledger()
        self.waits: Counter[Wait] = Counter()
        self.calls: Counter[Traffic] = Counter()
        self.sent: Counter[Traffic] = Counter()
        self.flops: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.phase = ""
        self._lock = threading.RLock()

    def __enter__(self) -> "SimulatedMode":
        # torch.tensor(..., device=) makes its values on the host, as for a GPU; PyTorch keeps this per thread.
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
            return NotImplemented  # it returns here as operations on local tensors
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor computes shapes
        with self._lock:
            return self._run(func, args, kwargs)

    def note(self, kind: str, operation: str) -> None:
        """Note that the host waits."""
        self.waits[Wait(self.phase, kind, operation, place(3))] += 1

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        leaves = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if name.startswith(("c10d::", "_c10d_functional")):
            return self._collective(func, args, kwargs, fake=fake)
        if not fake and (device := kwargs.get("device")) is not None and torch.device(device).type == TYPE:
            fake = True
        if not fake:
            return self._on_host(func, args, kwargs, leaves)
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None and (done := handler(self, func, args, kwargs)) is not NotImplemented:
            return done
        return self._computed(func, args, kwargs)

    def _on_host(self, func: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Tensor]) -> Any:
        """Compute on the host, or only pretend to if the result is large."""
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func.overloadpacket is aten.is_pinned:
            return True
        if func.overloadpacket is aten._pin_memory:
            return args[0]
        if func in (aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.zeros.default):
            meta = func(*args, **{**kwargs, "device": "meta"})
            device = kwargs.get("device") or (leaves[0].device if leaves else "cpu")
            if meta.nbytes >= LARGE and torch.device(device).type == "cpu":
                return self._computed(func, args, kwargs)
        return func(*args, **kwargs)

    def _computed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation, without values."""
        value = _moved(func, args, kwargs) if func.overloadpacket in MOVES else None
        args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        with self.fake:
            out = func(*args, **kwargs)
        if value is not None:
            out.fluvial_value = value
        self.operations[self.phase] += 1
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops[self.phase] += int(formula(*args, **kwargs, out_val=out))
        self._count(func, out)
        return out

    def _count(self, func: Any, out: Any) -> None:
        """Enter the storages of a result in the ledger."""
        line = ""
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor):
                kind = tensor.fake_device.type
                if kind not in (TYPE, "cpu"):
                    continue
                ledger, storage = self.ledger if kind == TYPE else self.host, tensor.untyped_storage()
                if not ledger.is_known(storage):
                    line = line or place(4) or f"backward, {func._schema.name.partition('::')[2]}"
                    ledger.add(storage, line)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Return a host tensor without its values."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self.fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made

    def _collective(self, func: Any, args: tuple, kwargs: dict[str, Any], *, fake: bool) -> Any:
        call = collectives.called(func, args, kwargs)
        if call is not None:
            kind = Traffic(self.phase, call.name, call.ranks, place(4))
            self.calls[kind] += 1
            self.sent[kind] += call.sent
        with self.fake if fake else nullcontext():
            out = func(*args, **kwargs)
        if fake:
            self._count(func, out)
            collectives.same_values(func, args)
        else:
            collectives.same_everywhere(func, args)
        return out

    # What needs more than a shape. A handler that returns NotImplemented leaves the operation to `_computed`.

    def _read(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == TYPE:
            self.note("read", func._schema.name.partition("::")[2])
        value = getattr(tensor, "fluvial_value", None)
        if value is not None:
            return value.item()
        return False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0

    def _equal(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        self.note("read", "equal")
        return True

    def _nonzero(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.note("read", "nonzero")
        tensor = args[0]
        made = aten.empty.memory_format
        return self._computed(made, ([tensor.numel(), tensor.dim()],), {"dtype": torch.int64, "device": tensor.device})

    def _to_copy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        source, device = args[0], kwargs.get("device")
        target = source.device if device is None else torch.device(device)
        if source.device.type == target.type:
            return NotImplemented
        if target.type == "meta":
            dtype = kwargs.get("dtype") or source.dtype
            return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
        waits = not kwargs.get("non_blocking", False)
        self._moves(source.device.type, target.type, waits=waits, operation="to")
        options: dict[str, Any] = {"dtype": kwargs.get("dtype") or source.dtype, "device": target}
        value = getattr(source, "fluvial_value", None)
        if target.type == "cpu":
            if value is not None:
                return value.to(options["dtype"]).clone()
            return self._on_host(aten.zeros.default, (list(source.shape),), options, [])
        like = self._as_fake(source)
        out = self._computed(aten.empty_like.default, (like,), options)
        if not isinstance(source, FakeTensor) and source.numel() <= FEW and not source.is_meta:
            out.fluvial_value = source.detach().to(options["dtype"]).clone()
        return out

    def _copy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        target, source = args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.device.type == source.device.type:
            return NotImplemented
        self._moves(source.device.type, target.device.type, waits=waits, operation="copy_")
        if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
            raise RuntimeError(f"copy_: a tensor of shape {list(source.shape)} does not fit into {list(target.shape)}")
        return target

    def _moves(self, source: str, target: str, *, waits: bool, operation: str) -> None:
        """Note a copy between host and device."""
        if target == TYPE:
            self.note("blocking copy to the device" if waits else "copy to the device", operation)
        elif source == TYPE and target == "cpu":
            self.note("read" if waits else "copy to the host", operation)

    def _index(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args[0].device.type != TYPE:
            return NotImplemented
        places: list[Tensor | None] = []
        for each in args[1]:
            if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                self.note("read", "index by a mask")
                number = {"dtype": torch.int64, "device": args[0].device}  # a mask that leaves nothing out
                every = self._computed(aten.empty.memory_format, ([each.numel()],), number)
                places += [every] * each.dim()
            else:
                if isinstance(each, Tensor) and each.device.type == "cpu":
                    self.note("blocking copy to the device", "index by a host tensor")
                places.append(each)
        return self._computed(func, (args[0], places, *args[2:]), kwargs)

    def _mask(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.note("read", "masked_select")
        options = {"dtype": args[0].dtype, "device": args[0].device}
        return self._computed(aten.empty.memory_format, ([args[0].numel()],), options)

    def _repeat(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.note("read", "repeat_interleave")
            length = args[0].shape[0]
            return self._computed(aten.empty.memory_format, ([length],), {"dtype": torch.int64, "device": args[0].device})
        return NotImplemented

    def _nothing(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        return None

    def _no(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        return False


def _moved(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the values of an operation's result, if those of all its tensors are known."""
    leaves = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(hasattr(leaf, "fluvial_value") for leaf in leaves):
        return None
    args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.fluvial_value, (args, kwargs))
    value = func(*args, **kwargs)
    return value if isinstance(value, Tensor) and value.numel() <= FEW else None


class _FakeMode(FakeTensorMode):
    """Fake tensors in several threads: what PyTorch keeps in the mode is kept per thread."""

    def __init__(self, **options: Any) -> None:
        self._local = threading.local()
        super().__init__(**options)

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether a kernel of this thread is running, to which fake tensors say that they are on meta."""
        return getattr(self._local, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._local.in_kernel = value

    @property
    def enter_stack(self) -> list[Any]:
        """What the mode found when this thread entered it."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[Any] = self._local.stack
        return stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._local.stack = value


_HANDLERS: dict[Any, Any] = {
    aten._local_scalar_dense: SimulatedMode._read,
    aten.item: SimulatedMode._read,
    aten.equal: SimulatedMode._equal,
    aten.nonzero: SimulatedMode._nonzero,
    aten._to_copy: SimulatedMode._to_copy,
    aten.copy_: SimulatedMode._copy,
    aten.index: SimulatedMode._index,
    aten.index_put_: SimulatedMode._index,
    aten.masked_select: SimulatedMode._mask,
    aten.repeat_interleave: SimulatedMode._repeat,
    aten.record_stream: SimulatedMode._nothing,
    aten.is_pinned: SimulatedMode._no,
}
