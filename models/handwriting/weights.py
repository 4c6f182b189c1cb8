"""Build a built-in network: a class of diffusers with fixed settings, and weights from a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = "diffusion_pytorch_model.safetensors"


def build(
    kind: Any, settings: Mapping[str, Any], weights: Path | None, *, name: str, seed: int, empty: bool = False
) -> nn.Module:
    """Return a network with its weights, in float32, or `empty`, with parameters on the meta device.

    Args:
        kind: model class of diffusers.
        settings: keyword arguments of the class.
        weights: folder of weights as diffusers saves it; None for random weights.
        name: name of the model, for messages.
        seed: seed of random weights.
        empty: whether to leave the parameters on the meta device.

    Raises:
        ValueError: the folder lacks a file or holds another model, or `empty` is set for random weights.
    """
    if weights is None:
        if empty:
            raise ValueError("a model with random weights cannot be built empty: it has no folder to load them from")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind(**settings)
    config = weights / "config.json"
    if not config.is_file():
        raise ValueError(f"{weights} holds no model: config.json is missing")
    if not (weights / FILE).is_file():
        raise ValueError(f"{weights} is incomplete: there is no {FILE}; only weights in the safetensors format are loaded")
    found = json.loads(config.read_text())
    if not isinstance(found, dict):
        raise ValueError(
            f"{config} is not of a model: it holds a {type(found).__name__}, expected a JSON object of settings"
        )
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
