"""Loading of weights into a sharded module: each rank reads its own shards, so none holds the whole model."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from fluvial.engines.engine.files import read_weights, shapes, weight_files
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.models.lora import is_adapter
from fluvial.models.protocol import Weights
from fluvial.models.quantised import find_quantised


def load_weights(module: nn.Module, folder: Weights, *, world: World) -> None:
    """Fill a (sharded) module's parameters and buffers from the safetensors of a model folder, in place.

    Every rank must take part. Adapters are left alone: the folder holds the weights that they adapt. Values are cast to the
    module's dtypes. Memory: the shards themselves, and one tensor's shard while it is read.

    Args:
        module: module that `parallelize` returned.
        folder: model folder of diffusers, with one weight file or several and their index; or a folder for each network of
            the module by name.
        world: process group the module is sharded over.

    Raises:
        UsageError: a tensor is missing or has another shape, or a file cannot be read.
    """
    if isinstance(folder, Mapping):
        for name, each in folder.items():
            load_weights(module.get_submodule(name), each, world=world)
        return
    # They share the module's storage.
    state = {name: each.detach() if isinstance(each, DTensor) else each.data for name, each in module.state_dict().items()}
    wanted = {plain_name(name): tensor for name, tensor in state.items() if not is_adapter(name)}
    quantised = {plain_name(f"{name}.weight"): layer for name, layer in find_quantised(module).items()}
    with world.agreed():
        held = shapes(folder)
        expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        expected.update((name, (layer.out_features, layer.in_features)) for name, layer in quantised.items())
        if missing := sorted(set(expected) - set(held)):
            raise UsageError(f"{folder} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
        for name, shape in expected.items():
            if held[name] != shape:
                raise UsageError(
                    f"{folder} holds another model: {name} has shape {list(held[name])} there, {list(shape)} here"
                )
        for name, tensor in read_weights(folder, quantised):
            quantised[name].fill(tensor.to(world.device))
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Only(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within the library
        dcp.load({**wanted}, storage_reader=reader)


def plain_name(name: str) -> str:
    """Return a tensor's name in the model without adapters; PEFT puts `base_layer` between a layer and its weight."""
    return name.replace(".base_layer.", ".")


class _Only(FileSystem):
    """A model folder as the library's reader lists it: the weight files alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ls(self, path: Any) -> list[str]:
        """Return the paths of the weight files."""
        return [str(file) for file in weight_files(self.folder)]
