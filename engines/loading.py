"""Weights from files into a sharded module: each rank reads its own shards, so none ever holds the whole model."""

import hashlib
import json
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from fluvial.engines.distributed import World
from fluvial.engines.errors import UsageError


def load_weights(module: nn.Module, folder: Path, *, world: World) -> None:
    """Fill a (sharded) module's parameters and buffers from the safetensors of a model folder, in place.

    Adapters are left as they are: the folder holds the weights beneath them. Values are cast to the module's dtypes. Memory:
    the shards themselves, and one tensor's shard while it is read.

    Args:
        module: as `parallelize` left it.
        folder: as diffusers saves a model, in one file or several.
        world: of the processes; every rank must take part.

    Raises:
        UsageError: a tensor is missing or has another shape, or a file cannot be read.
    """
    wanted = {plain_name(name): tensor for name, tensor in _tensors(module).items() if ".lora_" not in name}
    with world.agreed():
        held = shapes(folder)
        if missing := sorted(set(wanted) - set(held)):
            raise UsageError(f"{folder} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
        for name, tensor in wanted.items():
            if held[name] != tuple(tensor.shape):
                raise UsageError(
                    f"{folder} holds another model: {name} has shape {list(held[name])} there, {list(tensor.shape)} here"
                )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within the library
        dcp.load({**wanted}, storage_reader=HuggingFaceStorageReader(str(folder)))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model folder's safetensors, from their headers alone.

    Raises:
        UsageError: there are none, or one cannot be read.
    """
    found: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no weights: there is no .safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
    return found


def fingerprint(folder: Path) -> str:
    """Return a fingerprint of a model folder's weights, from each tensor's name, shape and first row.

    Training moves every tensor, so two sets of weights differ there; the whole of a large model is not read.

    Raises:
        UsageError: there are none, or one cannot be read.
    """
    shapes(folder)
    rows = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(name).get_shape()
                row = tensors.get_slice(name)[:1] if shape else tensors.get_tensor(name)
                rows[name] = [shape, row.double().flatten().tolist()]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def plain_name(name: str) -> str:
    """Return what a tensor is called in a model without adapters: PEFT puts `base_layer` between a layer and its weight."""
    return name.replace(".base_layer.", ".")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, as tensors that share the module's storage."""
    return {
        name: tensor.detach() if isinstance(tensor, DTensor) else tensor.data for name, tensor in module.state_dict().items()
    }
