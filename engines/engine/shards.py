"""Parameters that are sharded by rows: this rank's part, sums over the ranks, and optimizers of plain tensors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded; it shares its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() would be recorded for autograd


def shard_like(parameter: Any, part: Tensor, shape: tuple[int, ...] | None = None, *, replicated: bool = False) -> Tensor:
    """Return this rank's part as a tensor that is laid out as `parameter`; the part itself if that is not sharded.

    Args:
        parameter: sharded parameter whose mesh and placements are used.
        part: part of this rank.
        shape: shape over all ranks, by default that of the parameter.
        replicated: whether each rank holds the whole tensor instead.
    """
    if not isinstance(parameter, DTensor):
        return part
    spec = parameter._spec
    if shape is None and not replicated and part.dtype == parameter.dtype:
        return DTensor(part, spec, requires_grad=False)
    like = torch.empty(parameter.shape if shape is None else shape, dtype=part.dtype, device="meta")
    placements = tuple(Replicate() for _ in spec.placements) if replicated else spec.placements
    # As FSDP2 makes its own: from_local would move a shard that is kept on the CPU to the mesh's device.
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensor(part, DTensorSpec(spec.mesh, placements, tensor_meta=meta), requires_grad=False)


@contextmanager
def plain(optimizer: Optimizer) -> Iterator[None]:
    """Make an optimizer of sharded parameters hold this rank's parts as plain tensors, which share their storage.

    An operation on a list of DTensors works out the layout of each on its first call: seconds for hundreds of adapters.
    """
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        yield
        return
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    parts = list[nn.Parameter]()
    try:
        for group, parameters in groups:
            group["params"] = []
            for sharded in parameters:
                part = nn.Parameter(local(sharded).detach(), requires_grad=sharded.requires_grad)
                part.grad = None if sharded.grad is None else local(sharded.grad)
                optimizer.state[part] = {key: local(value) for key, value in optimizer.state[sharded].items()}
                group["params"].append(part)
                parts.append(part)
        yield
    finally:
        for group, parameters in groups:
            group["params"] = parameters
        for part in parts:
            optimizer.state.pop(part, None)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which compiles the step
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def sum_over_shards(parts: list[Tensor], parameters: list[Any]) -> list[Tensor]:
    """Return the sums of 1-dimensional tensors over the ranks that the parameters are sharded on, by one all-reduce."""
    if not parts:
        return []
    flat = torch.cat(parts)
    first = parameters[0]
    if isinstance(first, DTensor):
        shard = next(i for i, placement in enumerate(first.placements) if placement.is_shard())
        if first.device_mesh.size(shard) > 1:
            dist.all_reduce(flat, group=first.device_mesh.get_group(shard))
    return list(flat.split([math.prod(part.shape) for part in parts]))


def first_row(parameter: nn.Parameter) -> int:
    """Return the number of this rank's first row of a parameter that is sharded by rows."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0]) if offset else 0
