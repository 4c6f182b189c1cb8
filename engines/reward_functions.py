"""Rewards for pictures of any model: how small they compress."""

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.pictures import as_image

QUALITY = 95  # of the JPEGs


def jpeg_compressibility(pictures: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return minus the kilobytes of each picture as a JPEG of quality 95, `[B]`, of a film its frames' mean.

    Args:
        pictures: `[B, 3, H, W]` in [0, 1], or films `[B, 3, F, H, W]`.
        prompts: not looked at.

    Source: DDPO, arXiv 2305.13301.
    """

    def kilobytes(picture: Tensor) -> float:
        file = io.BytesIO()
        as_image(picture, width=picture.shape[-1]).save(file, format="JPEG", quality=QUALITY)
        return file.tell() / 1000

    def size(sample: Tensor) -> float:
        frames = sample.unbind(1) if sample.ndim == 4 else (sample,)
        return sum(map(kilobytes, frames)) / len(frames)

    return torch.tensor([-size(sample) for sample in pictures])
