"""Sharpness of images: a reward that needs no model, and shows when few steps blur.

Source: the variance of the Laplacian (LAPV) in Pertuz et al. 2013, doi 10.1016/j.patcog.2012.11.011.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d

LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


def sharpness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return r(x) = Var(Laplacian(grey(x))) over the pixels inside, float32 `[B]`; gradients flow to the images.

    An image without detail has 0; a blur lowers it, and so do fewer or thinner strokes: compare it with that of the
    same prompts by another sampler.

    Args:
        images: images `[B, C, H, W]` in [0, 1], or videos `[B, C, F, H, W]`, whose frames are averaged; at least 3 x 3.
        prompts: not used.
    """
    grey = images.float().mean(1)
    frames = grey.flatten(0, -3).unsqueeze(1) if grey.ndim == 4 else grey.unsqueeze(1)
    kernel = torch.tensor(LAPLACIAN, device=images.device)[None, None]
    variances = conv2d(frames, kernel).flatten(1).var(1, correction=0)
    return variances.reshape(len(images), -1).mean(1)


def make() -> Callable[[Tensor, Sequence[str]], Tensor]:
    """Return the reward; it has no options."""
    return sharpness
