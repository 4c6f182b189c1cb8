"""A simulated world: rank 0 of any number of ranks on the simulated device, with the threads that the program starts."""

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
    """The memory of a phase, its visits taken together."""

    before: int  # bytes at the beginning of the first visit
    peak: int
    after: int  # bytes at the end of the last visit
    peak_entry: int  # entry of the ledger at the peak
    spans: tuple[tuple[int, int], ...]  # entries of the ledger between which it ran


class Phases:
    """The phases of a program under a mode. A phase within another takes its operations out of it."""

    def __init__(self, mode: SimulatedMode) -> None:
        self.mode = mode
        self.by_name: dict[str, Phase] = {}
        self._start = 0  # entry at which the present phase began

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what happens in the context for a phase."""
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
    """The store of the ranks: what rank 0 has set, the others have set, too, under their own numbers."""

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
    """A simulation under way."""

    world: World  # rank 0 of the simulated ranks
    mode: SimulatedMode  # all that was noted
    phases: Phases  # their peaks


@contextlib.contextmanager
def simulate(*, ranks: int = 1, accelerator: Accelerator | None = None) -> Iterator[Simulation]:
    """Run what is in the context on a simulated accelerator, as rank 0 of a number of ranks.

    All ranks are taken to do what rank 0 does. A value that is read from the device is 0.

    Args:
        ranks: number of ranks.
        accelerator: the GPU.
    """
    accelerator, mode = accelerator or Accelerator(), SimulatedMode()
    active = ActiveDevice(accelerator, mode.ledger, lambda: mode.note("synchronisation", "synchronize"))
    store = _Store()  # as long as it has a name, its methods are found
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
    """Say why autograd does not know the device, where it was registered too late."""
    try:
        yield
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise UsageError(
            "a backward pass has run in this process before its first simulation, so that autograd does not know the "
            "simulated device: simulate in a new process, or call engines.extensions.simulate.device.register first"
        ) from error


@contextlib.contextmanager
def _patch_torch(mode: SimulatedMode) -> Iterator[None]:
    """Run threads under the mode, and tell the ledger of resized storages, which are no operations."""
    start, resize = threading.Thread.start, torch.UntypedStorage.resize_

    def start_under_mode(thread: threading.Thread) -> None:
        thread.run = partial(_under, mode, thread.run)  # type: ignore[method-assign]
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

    def reduce_tensor(tensor: Any, _: Any) -> Any:  # images that ranks show each other
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
        # Of the fake backend, which has none, PyTorch warns.
        patch.object(dist.ProcessGroup, "_has_hooks", lambda _: False),
        patch.object(torch.utils, "swap_tensors", _make_swap(torch.utils.swap_tensors)),
    ):
        yield


def _make_swap(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return `torch.utils.swap_tensors` for fake tensors, to which fake modes keep weak references that it refuses."""

    def swap(first: Any, second: Any) -> None:
        if not isinstance(first, FakeTensor) and not isinstance(second, FakeTensor):
            plain(first, second)
            return
        first.__class__, second.__class__ = second.__class__, first.__class__
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
        torch._C._swap_tensor_impl(first, second)

    return swap


def _make_data_accessors() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], None]]:
    """Return how `Tensor.data` is read, and written: also with a tensor of another device, which PyTorch allows on CUDA."""
    plain = torch._C.TensorBase.data

    def write(tensor: Tensor, value: Tensor) -> None:
        alike = tensor.device == value.device and isinstance(tensor, FakeTensor) == isinstance(value, FakeTensor)
        if alike and torch._has_compatible_shallow_copy_type(tensor, value):
            plain.__set__(tensor, value)  # type: ignore[attr-defined]
            return
        made: Tensor = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update({**tensor.__dict__, **made.__dict__})  # its own device
        torch.utils.swap_tensors(tensor, made)

    return plain.__get__, write  # type: ignore[attr-defined]


def _under(mode: SimulatedMode, run: Callable[[], None]) -> None:
    with mode:
        run()
