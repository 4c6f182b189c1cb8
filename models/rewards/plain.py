"""Rewards without a model: JPEG compressibility and incompressibility, and sharpness, which detects blur of few steps.

Sources: DDPO, arXiv 2305.13301, section 5.1; the variance of the Laplacian (LAPV) in Pertuz et al. 2013, doi
10.1016/j.patcog.2012.11.011.
"""

import io
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from fluvial.models.images import to_image

LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
QUALITY = 95  # of the JPEG encoder, as in the paper's code


def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return r(x) = -bytes(JPEG_95(x)) / 1000, the negative of `jpeg_incompressibility`, `[B]`."""
    return -jpeg_incompressibility(images, prompts)


def jpeg_incompressibility(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the size of each image as a JPEG file, in kilobytes, `[B]`: r(x) = bytes(JPEG_95(x)) / 1000.

    Args:
        images: images `[B, 3, H, W]` in [0, 1], or videos `[B, 3, F, H, W]`, whose frames are averaged.
        prompts: not used.
    """
    videos = [sample.unbind(1) if sample.ndim == 4 else (sample,) for sample in images]
    return torch.tensor([sum(map(_measure_kilobytes, frames)) / len(frames) for frames in videos])


def _measure_kilobytes(image: Tensor) -> float:
    """Return the size of an image `[C, H, W]` as a JPEG file, in kilobytes."""
    file = io.BytesIO()
    to_image(image, width=image.shape[-1]).save(file, format="JPEG", quality=QUALITY)
    return file.tell() / 1000


def sharpness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return r(x) = Var(Laplacian(grey(x))) over the inner pixels, float32 `[B]`; gradients flow to the images.

    An image without detail has 0. Blur lowers the value, and so do fewer or thinner strokes, so compare samplers on the
    same prompts.

    Args:
        images: images `[B, C, H, W]` in [0, 1], or videos `[B, C, F, H, W]`, whose frames are averaged; at least 3 x 3.
        prompts: not used.
    """
    grey = images.float().mean(1)
    frames = grey.flatten(0, -3).unsqueeze(1) if grey.ndim == 4 else grey.unsqueeze(1)
    kernel = torch.tensor(LAPLACIAN, device=images.device)[None, None]
    variances = conv2d(frames, kernel).flatten(1).var(1, correction=0)
    return variances.reshape(len(images), -1).mean(1)
