"""JPEG compressibility and incompressibility of images: rewards that need no model.

Source: DDPO, arXiv 2305.13301, section 5.1.
"""

import io
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fluvial.models.images import as_image

QUALITY = 95  # of the JPEG encoder, as in the paper's code


def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return r(x) = -bytes(JPEG_95(x)) / 1000, minus `jpeg_incompressibility`, `[B]`."""
    return -jpeg_incompressibility(images, prompts)


def jpeg_incompressibility(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the size of each image as a JPEG file, in kilobytes, `[B]`: r(x) = bytes(JPEG_95(x)) / 1000.

    Args:
        images: images `[B, 3, H, W]` in [0, 1], or videos `[B, 3, F, H, W]`, whose frames are averaged.
        prompts: not used.
    """
    videos = [sample.unbind(1) if sample.ndim == 4 else (sample,) for sample in images]
    return torch.tensor([sum(map(_kilobytes, frames)) / len(frames) for frames in videos])


def _kilobytes(image: Tensor) -> float:
    """Return the size of an image `[C, H, W]` as a JPEG file, in kilobytes."""
    file = io.BytesIO()
    as_image(image, width=image.shape[-1]).save(file, format="JPEG", quality=QUALITY)
    return file.tell() / 1000


def make_compressibility() -> Callable[[Tensor, Sequence[str]], Tensor]:
    """Return the reward; it has no options."""
    return jpeg_compressibility


def make_incompressibility() -> Callable[[Tensor, Sequence[str]], Tensor]:
    """Return the reward; it has no options."""
    return jpeg_incompressibility
