"""Tiny random pipelines of diffusers that are given images besides a prompt."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import stored
import torch
from PIL import Image
from tiny_pipelines import flux


def kontext() -> Any:
    """Build FLUX Kontext from the parts of FLUX.1: tokens of the image follow those of the sample."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**flux().components)


MAKERS = {"kontext": kontext}


def save(name: str, folder: Path) -> Path:
    """Save a pipeline to a folder with random weights, unless it is there, and return the folder."""
    if not folder.exists():
        stored.copy_of(f"conditioned-{name}", folder, partial(_make, name))
    return folder


def _make(name: str, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = MAKERS[name]()
        for part in ("transformer", "vae"):
            for parameter in getattr(pipeline, part).parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    pipeline.save_pretrained(folder)


def draw_image(file: Path, seed: int, size: tuple[int, int] = (16, 16)) -> Path:
    """Write an image of random pixels, and return its file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file
