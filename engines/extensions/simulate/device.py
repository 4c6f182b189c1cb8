"""Device type `simulated`: accepted by torch everywhere, without memory behind it.

PyTorch reserves one device type for backends outside of its tree (PrivateUse1). Here it gets a guard and hooks, so that
autograd runs on it, and `torch.simulated` with the functions of `torch.cuda`. Its tensors are fake: they have a shape, a
dtype, a device and a storage size, but no values.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fluvial.engines.extensions.simulate import operators
from fluvial.engines.extensions.simulate.memory import Ledger
from fluvial.models.device import SIMULATED as TYPE

GIB = 2**30


class Accelerator(NamedTuple):
    """Simulated GPU."""

    name: str = "NVIDIA H100 80GB HBM3"  # as its driver names it; decides the peak FLOP/s
    memory: int = 80 * GIB  # bytes

    @property
    def total_memory(self) -> int:
        """Memory in bytes, by its name in the properties of a CUDA device."""
        return self.memory


class ActiveDevice(NamedTuple):
    """Running simulation, from which the device answers queries."""

    accelerator: Accelerator
    ledger: Ledger
    synchronized: Callable[[], None]  # called when the host waits for the device


_active: list[ActiveDevice] = []  # empty, or the one simulation of this process


@contextlib.contextmanager
def simulate_device(active: ActiveDevice) -> Iterator[torch.device]:
    """Yield the device, the accelerator of this process within the context."""
    register()
    _active.append(active)
    try:
        yield torch.device(TYPE, 0)
    finally:
        _active.clear()


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return bool(_active)

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


class DeviceStream:
    """The only stream of the device, and also its events: work is done at once, so only the host ever waits."""

    stream_id = device_index = 0
    wait = wait_stream = wait_event = record = _ignore

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "DeviceStream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device(TYPE, 0)

    def synchronize(self) -> None:
        """Make the host wait for the device."""
        _active[-1].synchronized()

    def record_event(self, event: "DeviceStream | None" = None) -> "DeviceStream":
        """Return an event."""
        return event or DeviceStream()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, end: "DeviceStream") -> float:
        """Return 0: no work takes time."""
        return 0.0


@cache
def register() -> None:
    """Register the device type, once per process.

    Without a real accelerator this must precede the first backward pass of the process: autograd counts the devices then.
    """
    hooks, guard = _Hooks(), _Guard()
    _setup_privateuseone_for_python_backend(TYPE, _build_module(), hooks, guard)
    torch.distributed.Backend.default_device_backend_map.setdefault(TYPE, "fake")
    operators.register()


def _build_module() -> types.ModuleType:
    """Build `torch.simulated`, with the functions that PyTorch, diffusers and fluvial call of a device's module."""
    module, stream, here = types.ModuleType(f"torch.{TYPE}"), DeviceStream(), lambda *_: contextlib.nullcontext()
    state = torch.zeros(16, dtype=torch.uint8)
    always: Callable[..., Callable[..., Any]] = lambda value: lambda *_, **__: value  # noqa: E731
    now, peak = (lambda *_: _active[-1].ledger.now), (lambda *_: _active[-1].ledger.peak)
    functions: dict[str, Any] = {
        "Stream": DeviceStream, "Event": DeviceStream, "stream": here, "device": here, "device_index": here,
        "current_stream": always(stream), "default_stream": always(stream), "set_stream": _ignore,
        "is_available": lambda: bool(_active), "is_initialized": always(True), "is_bf16_supported": always(True),
        "_is_in_bad_fork": always(False), "device_count": lambda: len(_active), "current_device": always(0),
        "set_device": _ignore, "synchronize": lambda *_: _active[-1].synchronized(), "empty_cache": _ignore,
        "get_device_properties": lambda *_: _active[-1].accelerator,
        "get_device_name": lambda *_: _active[-1].accelerator.name, "get_device_capability": always((9, 0)),
        "get_amp_supported_dtype": always([torch.bfloat16, torch.float16]),
        "memory_allocated": now, "memory_reserved": now, "max_memory_allocated": peak, "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda *_: _active[-1].ledger.reset_peak(),
        "mem_get_info": lambda *_: (_active[-1].accelerator.memory - now(), _active[-1].accelerator.memory),
        "manual_seed": _ignore, "manual_seed_all": _ignore, "set_rng_state": _ignore, "get_rng_state": always(state),
    }  # fmt: skip
    for name, function in functions.items():
        setattr(module, name, function)
    return module
