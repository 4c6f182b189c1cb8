"""Exported folders: what is written, and what diffusers opens."""

from pathlib import Path

from diffusers import SD3Transformer2DModel
from helpers.lora_model import adapted, perturb
from torch import nn

SINGLE = "diffusion_pytorch_model.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def moved(*adapters: str) -> nn.Module:
    module = adapted(*adapters)
    for seed, adapter in enumerate(adapters or ("default",)):
        perturb(module, adapter, seed=seed)
    return module


def opened(folder: Path) -> nn.Module:
    module, info = SD3Transformer2DModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info
    return module


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
