"""Determinism, the same bits for the same numbers: a switch for torch's algorithms, and inputs with one layout in memory.

What is promised:

- The same machine, versions, ranks, threads and micro-batch give the same bits, run after run. A GPU needs `deterministic`.
- The first ratio of a rollout is exactly 1 if the old log-probabilities were recorded in micro-batches of the size that the
  update uses, with the same parameters requiring gradients. Every processor and number of threads keeps this promise.
- Otherwise results agree to rounding: another processor, number of threads or micro-batch sums in another order.
  `max_log_ratio` bounds how far rollout and update may differ.

Two causes would break the second promise. The bits of a matrix product can depend on its operands' addresses: MKL's do on
an AMD CPU, modulo 16 bytes. So the network gets its inputs from `fresh_copy`, in a rollout and in an update. And torch
multiplies a batch as one matrix if the weight requires a gradient, else as many. So adapters are added before the first
rollout.

MKL_CBWR=COMPATIBLE would also remove the first cause. It is not set, because MKL accepts it only before its first product,
never takes it back, and computes up to five times slower with it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from optree import PyTree
from torch import Tensor

from fluvial.models.host_values import recall, remember, to_device


def fresh_copy(tensors: PyTree[Tensor], device: torch.device) -> PyTree[Tensor]:
    """Return contiguous copies on a device, each at the start of its own storage, which torch aligns to 64 bytes or more."""

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.device.type != device.type:
            return to_device(tensor.contiguous(), device)
        copy = tensor.to(device, non_blocking=True, copy=True, memory_format=torch.contiguous_format)
        host = recall(tensor)
        return copy if host is None else remember(copy, host)

    return optree.tree_map(copy_tensor, tensors)


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
