"""Samples as image files, for the wire."""

import base64
import io

from PIL import Image
from torch import Tensor

from fluvial.models.images import as_image

QUALITY = 95  # of JPEG, as published clients send it


def frames(sample: Tensor) -> list[Tensor]:
    """Return the frames `[C, H, W]` of a video `[C, F, H, W]`; an image is its only frame."""
    return list(sample.unbind(1)) if sample.ndim == 4 else [sample]


def spread(sample: Tensor, most: int) -> list[Tensor]:
    """Return at most `most` evenly spaced frames of a sample, the first and the last among them."""
    found = frames(sample)
    if len(found) <= most:
        return found
    steps = max(most - 1, 1)
    return [found[round(number * (len(found) - 1) / steps)] for number in range(most)]


def png(image: Tensor, *, size: int = 0, colour: bool = True) -> bytes:
    """Return an image `[C, H, W]` in [0, 1] as a PNG file, resized to `size` x `size` pixels unless that is 0.

    Args:
        colour: whether to convert an image of one channel to RGB.
    """
    return _file(image, size, colour=colour, format="PNG")


def jpeg(image: Tensor, *, quality: int = QUALITY) -> bytes:
    """Return an image `[C, H, W]` in [0, 1] as a JPEG file."""
    return _file(image, 0, format="JPEG", quality=quality)


def as_text(file: bytes) -> str:
    """Return a file as base64."""
    return base64.b64encode(file).decode("ascii")


def _file(image: Tensor, size: int, *, colour: bool = True, **options: object) -> bytes:
    file, made = io.BytesIO(), as_image(image, width=1, colour=colour)
    if size:
        made = made.resize((size, size), Image.Resampling.BICUBIC)
    made.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()
