"""The built-in networks: one of diffusers' classes with settings of its own, and the folder of its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def build(
    kind: Any, settings: Mapping[str, Any], weights: Path | None, *, name: str, seed: int, empty: bool = False
) -> nn.Module:
    """Return a network with its weights, in float32, or `empty`, with parameters on the meta device.

    Args:
        kind: a model class of diffusers.
        settings: its keyword arguments.
        weights: a folder as diffusers saves one; None draws random weights.
        name: of the model, for messages.
        seed: of the random weights.
        empty: leave the weights to who builds it.

    Raises:
        ValueError: the folder is missing a file or holds another model, or empty was asked for without one.
    """
    if weights is None:
        if empty:
            raise ValueError("a model with random weights has no folder that they could be read from")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind(**settings)
    config = weights / "config.json"
    if not config.is_file():
        raise ValueError(f"{weights} holds no model: config.json is missing")
    found = json.loads(config.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{config} is not of a model: it holds no settings")
    if different := [setting for setting, value in settings.items() if found.get(setting) != value]:
        raise ValueError(f"{config} is not of the {name} model: {', '.join(different)} differ")
    if empty:
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return kind(**settings)
    module = kind.from_pretrained(weights, use_safetensors=True, local_files_only=True)
    if missing := [key for key, tensor in module.state_dict().items() if tensor.is_meta]:
        raise ValueError(f"{weights} is incomplete: {missing[0]} and {len(missing) - 1} more tensors are missing")
    return module
