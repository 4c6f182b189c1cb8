"""Accelerator of this process: CUDA, ROCm (which torch calls cuda), XPU or NPU.

`torch.get_device_module(device)` has the functions of `torch.cuda` for each of them.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIMULATED = "simulated"  # type of the device of `engines.extensions.simulate`, whose tensors have no values


def find_default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU; Apple's is not used, because FSDP2 does not run there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "mps":
        return torch.device(accelerator.type)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory and streams separate from the host's."""
    return device.type not in ("cpu", "meta")


def set_current_device(device: torch.device) -> None:
    """Make a device the current one of this thread; a new thread starts with the machine's first, on every rank."""
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)


def record_use(*tensors: Tensor | None) -> None:
    """Record that this thread's stream reads tensors of another stream, so that their memory is not reused too early."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device):
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def has_values(device: torch.device) -> bool:
    """Return whether tensors of a device have values; otherwise nothing needs to be read from files."""
    return device.type not in (SIMULATED, "meta")


def describe_processor(device: torch.device) -> str:
    """Return the name of a device; for a CPU with the vector instructions that torch uses."""
    if is_accelerator(device):
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{read_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def read_cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def use_deterministic_algorithms(on: bool) -> Iterator[None]:
    """Make torch use only deterministic algorithms inside the context, and raise on operations that have none.

    The same seed then gives the same bits on the same machine, versions and number of ranks. On CUDA some algorithms are
    slower, cuDNN's benchmark is off, and cuBLAS gets a fixed workspace. CUBLAS_WORKSPACE_CONFIG stays set, because cuBLAS
    reads it once. A CPU with a fixed number of threads needs none of this.
    """
    if not on:
        yield
        return
    memory: Any = torch.utils.deterministic  # has its setting as a property, which type checkers do not see
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        memory.fill_uninitialized_memory = False  # nothing here reads memory that it did not write
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill
