"""Tensors viewed as rows, and the partition of a row, which depends only on its length."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

# Elements per block, and blocks per program. 1024 elements over 4 warps are 8 per thread: one 128-bit access of a 16-bit
# dtype, two of float32. Four blocks per program keep several loads in flight, and the partial sums few.
BLOCK = 1024
BLOCKS = 4
ELEMENTS_A_WARP = 8 * (64 if torch.version.hip else 32)


# Multiply-adds are fused only where the kernels request it (tl.fma). Otherwise the compiler decides by the surrounding
# code, and the same log-prob would have other bits in different kernels.
EXACT = {"enable_fp_fusion": False}


# Launches of a forward pass over rows of several chunks: 1 (the last program of a row adds up its partial sums) or 2
# (another kernel does). Both add in the same order, to the same bits; kernels/README.md compares their speed.
LAUNCHES = 2
_counters: dict[tuple[torch.device, int], Tensor] = {}


class Partition(NamedTuple):
    """How the kernels cut rows of N elements: `chunks` programs per row, each of `blocks` blocks of 2^levels elements.

    It depends on N alone, not on the batch or the machine, and it is not tuned at run time. So a sample has the same bits in
    any batch and in any run.
    """

    chunks: int
    blocks: int
    levels: int
    warps: int
    chunk_levels: int  # partial sums of a row are added in blocks of 2^chunk_levels
    chunk_warps: int


def partition(length: int) -> Partition:
    """Return the partition of rows of `length` elements, at least 1."""
    block = min(max(triton.next_power_of_2(length), 8), BLOCK)
    blocks = min(-(-length // block), BLOCKS)
    chunks = -(-length // (block * blocks))
    group = min(max(triton.next_power_of_2(chunks), 8), BLOCK)
    return Partition(chunks, blocks, _log2(block), _warps(block), _log2(group), _warps(group))


@contextmanager
def launches(count: Literal[1, 2]) -> Iterator[None]:
    """Set the number of launches per forward pass over long rows within the block, for comparisons."""
    global LAUNCHES
    kept, LAUNCHES = LAUNCHES, count
    try:
        yield
    finally:
        LAUNCHES = kept


def counters(rows: int, device: torch.device) -> Tensor | None:
    """Return the counters of the programs of `rows` rows, all zero, or None with two launches.

    A kernel resets them to zero. Kernels of one stream run one after another and share its counters; other streams have
    their own.
    """
    if LAUNCHES == 2:
        return None
    key = (device, 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id)
    known = _counters.get(key)
    if known is None or len(known) < rows:
        _counters[key] = known = torch.zeros(triton.next_power_of_2(max(rows, 256)), dtype=torch.int32, device=device)
    return known[:rows]


def row_length(tensor: Tensor) -> int:
    """Return the number of elements of one sample."""
    return math.prod(tensor.shape[1:])


def operand(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a tensor `[B, *event]` or `[B]` as (rows of unit stride, stride between rows); None gives (None, 0).

    It is a view if the layout allows it, else a copy. Rows may have gaps between them (a slice of a trajectory, half of
    a guided batch) or coincide (an expanded tensor).
    """
    if tensor is None:
        return None, 0
    if not tensor[:1].is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make a tensor's device the current one; Triton launches kernels there."""
    if tensor.device.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(tensor.device.index)


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _warps(block: int) -> int:
    return max(block // ELEMENTS_A_WARP, 1)
