"""Row-sharded parameters: this rank's part, sums over the ranks, and optimizers on plain tensors."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import UsageError
from fluvial.engines.files import list_weight_files, read_shapes, read_weights
from fluvial.models.lora import is_adapter
from fluvial.models.protocol import Weights
from fluvial.models.quantised import find_quantised


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded; it shares its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() would be recorded for autograd


def shard_like(parameter: Any, part: Tensor, shape: tuple[int, ...] | None = None, *, replicated: bool = False) -> Tensor:
    """Return this rank's part as a tensor laid out like `parameter`; the part itself if that is not sharded.

    Args:
        parameter: sharded parameter whose mesh and placements are used.
        part: part of this rank.
        shape: shape over all ranks, by default the parameter's.
        replicated: whether each rank has the full tensor instead.
    """
    if not isinstance(parameter, DTensor):
        return part
    spec = parameter._spec
    if shape is None and not replicated and part.dtype == parameter.dtype:
        return DTensor(part, spec, requires_grad=False)
    like = torch.empty(parameter.shape if shape is None else shape, dtype=part.dtype, device="meta")
    placements = tuple(Replicate() for _ in spec.placements) if replicated else spec.placements
    # As FSDP2 does it: from_local would move a shard on the CPU to the mesh's device.
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensor(part, DTensorSpec(spec.mesh, placements, tensor_meta=meta), requires_grad=False)


@contextmanager
def plain(optimizer: Optimizer) -> Iterator[None]:
    """Replace an optimizer's sharded parameters by this rank's shards as plain tensors, which share their storage.

    The first operation on a list of DTensors derives the layout of each: seconds for hundreds of adapters.
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
    """Return the sums of 1-dimensional tensors over the ranks that the parameters are sharded on, in one all-reduce."""
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
    """Return the index, over all ranks, of this rank's first row of a row-sharded parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0]) if offset else 0


@collective
def load_weights(module: nn.Module, folder: Weights, *, world: World) -> None:
    """Fill a (sharded) module's parameters and buffers from the safetensors of a model folder, in place.

    Adapters are not read: the folder has the base weights. Values are cast to the module's dtypes. Memory: the shards, and
    one tensor's shard while it is read.

    Args:
        module: module that `parallelize` returned.
        folder: diffusers model folder, with one weight file or several and their index; or a folder per network of the
            module, by name.
        world: process group the module is sharded over.

    Raises:
        UsageError: a tensor is missing or has another shape, or a file cannot be read.
    """
    if isinstance(folder, Mapping):
        for name, network_folder in folder.items():
            load_weights(module.get_submodule(name), network_folder, world=world)
        return
    # These tensors share the module's storage.
    state = {name: t.detach() if isinstance(t, DTensor) else t.data for name, t in module.state_dict().items()}
    base_tensors = {plain_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}
    quantised = {plain_name(f"{name}.weight"): layer for name, layer in find_quantised(module).items()}
    with world.agreed():
        stored_shapes = read_shapes(folder)
        expected = {name: tuple(tensor.shape) for name, tensor in base_tensors.items()}
        expected.update((name, (layer.out_features, layer.in_features)) for name, layer in quantised.items())
        if missing := sorted(set(expected) - set(stored_shapes)):
            raise UsageError(f"{folder} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
        for name, shape in expected.items():
            if stored_shapes[name] != shape:
                raise UsageError(
                    f"{folder} holds another model: {name} has shape {list(stored_shapes[name])} there, {list(shape)} here"
                )
        for name, tensor in read_weights(folder, quantised):
            quantised[name].fill(tensor.to(world.device))
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _WeightFiles(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within torch
        dcp.load({**base_tensors}, storage_reader=reader)


def plain_name(name: str) -> str:
    """Return a tensor's name in the model without adapters; PEFT puts `base_layer` between a layer and its weight."""
    return name.replace(".base_layer.", ".")


class _WeightFiles(FileSystem):
    """File system of torch's reader that lists only the weight files of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ls(self, path: Any) -> list[str]:
        """Return the paths of the weight files."""
        return [str(file) for file in list_weight_files(self.folder)]
