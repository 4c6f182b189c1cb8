"""Conversion between image tensors and PIL images."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def shown_frames(count: int) -> list[int]:
    """Return the first, the middle and the last frame of a video of `count` frames, each once."""
    last = count - 1
    return sorted({0, last // 2, last})


def as_image(sample: Tensor, *, width: int, colour: bool = True) -> Image.Image:
    """Return an image tensor `[C, H, W]` in [0, 1] as a PIL image, enlarged by a whole factor to at most `width` pixels.

    Args:
        sample: image of 1 or 3 channels, or a video `[C, F, H, W]`, of which the first, middle and last frame are shown.
        width: largest width in pixels, unless the image itself is wider.
        colour: whether to convert an image of one channel to RGB.
    """
    if sample.ndim == 4:
        sample = torch.cat([sample[:, frame] for frame in shown_frames(sample.shape[1])], dim=-1)
    array = (sample.clamp(0, 1) * 255).round().byte().cpu().numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1))
    image = image.convert("RGB") if colour else image
    factor = max(width // image.width, 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
