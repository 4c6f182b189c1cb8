"""One switch for algorithms that give the same bits every time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Let torch use deterministic algorithms only, and refuse operations that have none; as before afterwards.

    The same seed then gives the same bits on the same machine, versions and number of ranks. On CUDA some algorithms are
    slower, cuBLAS takes a workspace of its own (it must be asked for before cuBLAS is first used), and cuDNN's benchmark is
    off. On a CPU with a fixed number of threads what fluvial does gives the same bits anyway.
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
