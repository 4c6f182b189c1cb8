"""Simulated world: rank 0 of any number of ranks on the simulated device, with the threads of the program."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fluvial.engines.engine.world import World, enter_world
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.simulate.device import TYPE, Accelerator, ActiveDevice, DeviceStream, simulate_device
from fluvial.engines.extensions.simulate.mode import SimulatedMode


class Phase(NamedTuple):
    """Memory of a phase over all its visits."""

    before: int  # bytes at the beginning of the first visit
    peak: int
    after: int  # bytes at the end of the last visit
    peak_entry: int  # entry of the ledger at the peak
    spans: tuple[tuple[int, int], ...]  # first and last entry of the ledger per visit


class Phases:
    """Phases of a program under a mode. The operations of a nested phase do not count for the outer one."""

    def __init__(self, mode: SimulatedMode) -> None:
        self.mode = mode
        self.by_name: dict[str, Phase] = {}
        self._start = 0  # entry at which the current phase began

    @contextlib.contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Count the operations in the context for a phase."""
        outer = self.mode.phase
        if outer == name:
            yield
            return
        self._end(outer)
        self._begin(name)
        try:
            yield
        finally:
            self._end(name)
            self._begin(outer)

    def _begin(self, name: str) -> None:
        ledger = self.mode.ledger
        self.mode.phase, self._start = name, ledger.entries
        ledger.reset_peak()
        if name and name not in self.by_name:
            self.by_name[name] = Phase(ledger.now, 0, ledger.now, ledger.entries, ())

    def _end(self, name: str) -> None:
        ledger, known = self.mode.ledger, self.by_name.get(name)
        if known is None:
            return
        higher = ledger.peak > known.peak
        self.by_name[name] = known._replace(
            peak=ledger.peak if higher else known.peak,
            peak_entry=ledger.peak_entry if higher else known.peak_entry,
            after=ledger.now,
            spans=(*known.spans, (self._start, ledger.entries)),
        )


class _Store(FakeStore):
    """Store of the ranks: every key that rank 0 sets counts as set by the others, under their own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether every key is set."""
        return all(key in self.values or re.sub(r"/\d+$", "/0", key) in self.values for key in keys)


class Simulation(NamedTuple):
    """Running simulation."""

    world: World  # rank 0 of the simulated ranks
    mode: SimulatedMode  # counters of all costs
    phases: Phases


@contextlib.contextmanager
def simulate(*, ranks: int = 1, accelerator: Accelerator | None = None) -> Iterator[Simulation]:
    """Run the context on a simulated accelerator, as rank 0 of a number of ranks.

    All ranks are assumed to do what rank 0 does. Values read from the device are 0.

    Args:
        ranks: number of ranks.
        accelerator: simulated GPU.
    """
    accelerator, mode = accelerator or Accelerator(), SimulatedMode()
    active = ActiveDevice(accelerator, mode.ledger, lambda: mode.note("synchronisation", "synchronize"))
    store = _Store()  # referenced here, because torch holds only the C++ part, without the methods of the subclass
    with simulate_device(active) as device, _patch_torch(mode):
        dist.init_process_group(f"cpu:fake,{TYPE}:fake", store=store, rank=0, world_size=ranks)
        try:
            world = World(0, ranks, device, init_device_mesh(TYPE, (ranks,), mesh_dim_names=("shard",)))
            with enter_world(world), mode, _explain_late_device():
                yield Simulation(world, mode, Phases(mode))
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _explain_late_device() -> Iterator[None]:
    """Explain the error of autograd if the device was registered too late."""
    try:
        yield
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise UsageError(
            "a backward pass has run in this process before its first simulation, so autograd does not know the "
            "simulated device: simulate in a new process, or call engines.extensions.simulate.device.register first"
        ) from error


@contextlib.contextmanager
def _patch_torch(mode: SimulatedMode) -> Iterator[None]:
    """Run threads under the mode, and note resized storages, which are not dispatched as operations."""
    start, resize = threading.Thread.start, torch.UntypedStorage.resize_

    def start_under_mode(thread: threading.Thread) -> None:
        thread.run = partial(_run_under, mode, thread.run)  # type: ignore[method-assign]
        start(thread)

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        mode.ledger.note_resize(storage)
        return out

    def to_list(tensor: Any) -> Any:
        mode.note("read", "tolist")
        value = getattr(tensor, "fluvial_value", None)
        return (torch.zeros(tensor.shape, dtype=tensor.dtype) if value is None else value).tolist()

    def to_numpy(tensor: Any, **_: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()

    def reduce_tensor(tensor: Any, _: Any) -> Any:  # ranks send each other images as pickles
        return partial(torch.zeros, dtype=tensor.dtype), (tuple(tensor.shape),)

    with (
        patch.object(threading.Thread, "start", start_under_mode),
        patch.object(torch.UntypedStorage, "resize_", resize_and_note),
        patch.object(FakeTensor, "tolist", to_list),
        patch.object(FakeTensor, "numpy", to_numpy),
        patch.object(FakeTensor, "__reduce_ex__", reduce_tensor),
        patch.object(FakeTensor, "record_stream", lambda *_: None),
        patch.object(torch.Tensor, "data", property(*_make_data_accessors())),
        patch.object(torch.accelerator, "current_stream", lambda *_: DeviceStream()),
        # PyTorch warns that the fake backend has no hooks.
        patch.object(dist.ProcessGroup, "_has_hooks", lambda _: False),
        patch.object(torch.utils, "swap_tensors", _make_swap(torch.utils.swap_tensors)),
    ):
        yield


def _make_swap(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a `torch.utils.swap_tensors` that accepts fake tensors, to which fake modes hold weak references."""

    def swap(first: Any, second: Any) -> None:
        if not isinstance(first, FakeTensor) and not isinstance(second, FakeTensor):
            plain(first, second)
            return
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)

    return swap


def _make_data_accessors() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], None]]:
    """Return getter and setter of `Tensor.data`; the setter accepts a tensor of another device, as PyTorch does on CUDA."""
    plain = torch._C.TensorBase.data

    def write(tensor: Tensor, value: Tensor) -> None:
        alike = tensor.device == value.device and isinstance(tensor, FakeTensor) == isinstance(value, FakeTensor)
        if alike and torch._has_compatible_shallow_copy_type(tensor, value):
            plain.__set__(tensor, value)  # type: ignore[attr-defined]
            return
        new: Tensor = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update({**tensor.__dict__, **new.__dict__})  # the new device wins
        torch.utils.swap_tensors(tensor, new)

    return plain.__get__, write  # type: ignore[attr-defined]


def _run_under(mode: SimulatedMode, run: Callable[[], None]) -> None:
    with mode:
        run()
