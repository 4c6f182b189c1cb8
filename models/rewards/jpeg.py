"""Rewards for images of any model: how small they compress."""

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.models.images import as_image

QUALITY = 95  # of the JPEGs


def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return minus the kilobytes of each image as a JPEG of quality 95, `[B]`, of a video its frames' mean.

    Args:
        images: `[B, 3, H, W]` in [0, 1], or videos `[B, 3, F, H, W]`.
        prompts: not looked at.

    Source: DDPO, arXiv 2305.13301.
    """

    def kilobytes(image: Tensor) -> float:
        file = io.BytesIO()
        as_image(image, width=image.shape[-1]).save(file, format="JPEG", quality=QUALITY)
        return file.tell() / 1000

    def size(sample: Tensor) -> float:
        frames = sample.unbind(1) if sample.ndim == 4 else (sample,)
        return sum(map(kilobytes, frames)) / len(frames)

    return torch.tensor([-size(sample) for sample in images])
