"""Tensors as rows, and how a row is cut into pieces: by its length alone, so that a sample's bits depend on nothing else."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

# A program's block, and how many of them it goes through. 1024 elements over 4 warps are 8 a thread: one 128-bit access
# of a 16-bit dtype, two of float32. Four blocks a program keep several loads in flight, and the partial sums small.
BLOCK = 1024
BLOCKS = 4
ELEMENTS_A_WARP = 8 * (64 if torch.version.hip else 32)


# Multiply-adds are fused where the kernels say so (tl.fma) and nowhere else. Left to itself the compiler fuses what is next
# to what, and the same log-prob comes out another number in a kernel that goes on to subtract from it.
EXACT = {"enable_fp_fusion": False}


class Partition(NamedTuple):
    """How the kernels cut rows of N elements: `chunks` programs a row, each `blocks` blocks of 2^levels elements.

    It depends on N and on nothing else: neither on the batch nor on the machine, and it is not tuned at run time, so that
    a sample's bits are the same in any batch and in any run.
    """

    chunks: int
    blocks: int
    levels: int
    warps: int
    chunk_levels: int  # the partial sums of a row are added in blocks of 2^chunk_levels
    chunk_warps: int


def partition(length: int) -> Partition:
    """Return the partition of rows of `length` elements, at least 1."""
    block = min(max(triton.next_power_of_2(length), 8), BLOCK)
    blocks = min(-(-length // block), BLOCKS)
    chunks = -(-length // (block * blocks))
    group = min(max(triton.next_power_of_2(chunks), 8), BLOCK)
    return Partition(chunks, blocks, _log2(block), _warps(block), _log2(group), _warps(group))


def row_length(tensor: Tensor) -> int:
    """Return the number of elements of one sample."""
    return math.prod(tensor.shape[1:])


def operand(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Return `[B, *event]` or `[B]` as (rows of unit stride, elements from one row to the next); None stays None.

    It is a view where the layout allows it, else a copy. Rows may lie apart, or be one and the same: a slice of a
    trajectory, one half of a guided batch, an expanded tensor.
    """
    if tensor is None:
        return None, 0
    if not tensor[:1].is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make a tensor's device the current one, which is where Triton launches."""
    if tensor.device.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(tensor.device.index)


def scalars(tensor: Tensor, batch: int) -> Tensor:
    """Return a 0-d or `[B]` tensor as float32 `[B]`, without a copy if it has that dtype."""
    return tensor.to(torch.float32).expand(batch)


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _warps(block: int) -> int:
    return max(block // ELEMENTS_A_WARP, 1)
