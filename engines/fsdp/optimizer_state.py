"""Layout of an optimizer's state: how each of its tensors is sharded, what it takes, and what a checkpoint holds of it.

A tensor of the state is sharded as its parameter (by rows) or held on every rank. One in 8 bits is a torchao tensor of codes
and of one scale per block of 256 values. Blocks never cross rows, so codes and scales are sharded by rows too and can be
loaded on another number of ranks.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # smaller tensors are not quantised, as in bitsandbytes (arXiv 2110.02861)
TABLE = 256 * 4  # bytes of the table that maps codes to values


class Buffer(NamedTuple):
    """One tensor of a parameter's optimizer state."""

    shape: tuple[int, ...]  # over all ranks
    sharded: bool = True  # by rows as the parameter, else on every rank
    bits: Literal["float32", "signed8", "unsigned8"] = "float32"

    @property
    def quantised(self) -> bool:
        """Whether it is held in 8 bits: a large enough tensor whose rows are whole blocks."""
        row = math.prod(self.shape[1:])
        return self.bits != "float32" and self.shape[0] * row >= SMALLEST and row % BLOCK == 0

    def nbytes(self, ranks: int) -> int:
        """Return the bytes on the first of `ranks` ranks, which has the largest shard."""
        rows = math.ceil(self.shape[0] / ranks) if self.sharded else self.shape[0]
        values = rows * math.prod(self.shape[1:])
        return values + 4 * values // BLOCK + TABLE if self.quantised else 4 * values


def allocate(parameter: nn.Parameter, buffer: Buffer) -> DTensor:
    """Return a tensor of zeros for the state of a sharded parameter."""
    shard = local(parameter)
    shape: tuple[int, ...] = (int(shard.shape[0]), *buffer.shape[1:]) if buffer.sharded else buffer.shape
    if buffer.quantised and 0 not in shape:
        from torchao.optim.subclass_8bit import OptimState8bit

        part = OptimState8bit.zeros(shape, buffer.bits == "signed8", BLOCK, shard.device, dtype=torch.float32)
    else:
        part = torch.zeros(shape, device=shard.device)
    return sharded_like(parameter, part, buffer.shape, replicated=not buffer.sharded)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded; it shares its storage."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor  # to_local() is recorded for autograd


def sharded_like(parameter: Any, part: Tensor, shape: tuple[int, ...] | None = None, *, replicated: bool = False) -> DTensor:
    """Return this rank's part as a tensor that is laid out as `parameter`.

    Args:
        parameter: sharded parameter whose mesh and placements are used.
        part: part of this rank.
        shape: shape over all ranks, by default that of the parameter.
        replicated: whether each rank holds the whole tensor instead.
    """
    spec = parameter._spec
    if shape is None and not replicated and part.dtype == parameter.dtype:
        return DTensor(part, spec, requires_grad=False)
    like = torch.empty(parameter.shape if shape is None else shape, dtype=part.dtype, device="meta")
    placements = tuple(Replicate() for _ in spec.placements) if replicated else spec.placements
    # As FSDP2 makes its own: from_local would move a shard that is kept on the CPU to the mesh's device.
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensor(part, DTensorSpec(spec.mesh, placements, tensor_meta=meta), requires_grad=False)


def saved(state: Mapping[str, Any], buffers: Mapping[str, Buffer]) -> dict[str, DTensor]:
    """Return the tensors of a parameter's state that a checkpoint holds, without the step count; they share its storage.

    Args:
        state: state of the parameter, as the optimizer has it.
        buffers: layout of its tensors.
    """
    tensors: dict[str, DTensor] = {}
    for key, buffer in buffers.items():
        tensor = state[key]
        if not buffer.quantised:
            tensors[key] = tensor
            continue
        part, row = tensor.to_local(), math.prod(buffer.shape[1:])
        if part.numel():
            codes, scale = part.codes, part.scale
        else:  # a rank without rows holds an empty tensor, which has no blocks
            codes, scale = part.to(torch.uint8), part
        tensors[f"{key}.codes"] = sharded_like(tensor, codes)
        shape = (buffer.shape[0], row // BLOCK)
        tensors[f"{key}.scale"] = sharded_like(tensor, scale.view(len(codes), row // BLOCK), shape)
    return tensors
