"""The accelerator of this process, of whatever kind: CUDA, ROCm (which torch calls cuda), XPU, NPU.

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


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU. Apple's is not one: FSDP2 does not run there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "mps":
        return torch.device(accelerator.type)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory and streams apart from the host's."""
    return device.type not in ("cpu", "meta")


def compute_on(device: torch.device) -> None:
    """Make a device the current one of this thread; a new thread has the first of the machine's, on every rank."""
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)


def use_here(*tensors: Tensor | None) -> None:
    """Keep the memory of another stream's tensors from being used again while the work of this thread still reads them."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device):
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def has_values(device: torch.device) -> bool:
    """Return whether tensors of a device have values; otherwise nothing needs to be read from files."""
    return device.type not in (SIMULATED, "meta")


def processor(device: torch.device) -> str:
    """Return the name of a device, for a CPU with the vector instructions that torch uses there."""
    if is_accelerator(device):
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{cpu()} ({torch.backends.cpu.get_cpu_capability()})"


def cpu() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms only, and raise on operations that have none; restored afterwards.

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
