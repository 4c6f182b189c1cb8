"""Image files, decoded in one way, and conversion between image tensors and PIL images."""

import io
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps
from torch import Tensor

ENDINGS = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"}
)  # suffixes of the images of a folder
READING = "2"  # version of `read_image` in the keys of caches: raise it when the pixels of any file change
GREY = ("1", "L", "LA")
BITS, PHOTOMETRIC = 258, 262  # tags of TIFF
ON_SIDE = range(5, 9)  # EXIF orientations of an image that lies on its side


def read_image(file: Path | bytes, *, formats: Collection[str] | None = None) -> Image.Image:
    """Return an image file as a viewer shows it: upright, in 8 bits per channel, of mode L if it is grey, else RGB.

    Integers of 16 bits are scaled to 8 bits, floats from [0, 1]. Transparent pixels are composited over white, which one
    line on stderr reports. Palettes and CMYK become RGB; colour profiles are not applied.

    Args:
        file: the file, or its bytes.
        formats: names of PIL's decoders that may read it; by default all.

    Raises:
        ValueError: the file cannot be read as an image, or its number for white is unknown (integers of 32 bits, floats
            outside [0, 1]); the message names the file.
    """
    with open_image(file, formats=formats) as image:
        return convert_image(image)


def read_image_size(file: Path | bytes) -> tuple[int, int]:
    """Return (height, width) of an upright image file; for the error see `read_image`."""
    with open_image(file) as image:
        on_side = image.getexif().get(ExifTags.Base.Orientation) in ON_SIDE
        # PIL swaps the sides of a TIFF itself.
        return image.size if on_side and image.format != "TIFF" else (image.height, image.width)


def convert_image(image: ImageFile.ImageFile) -> Image.Image:
    """Convert an image, or its current frame, as `read_image` does; ValueError if the number for white is unknown."""
    tags: Any = getattr(image, "tag_v2", {})
    white, inverted = _find_white(image, tags), tags.get(PHOTOMETRIC) == 0
    turned = ImageOps.exif_transpose(image)
    if white is not None:
        numbers = np.asarray(turned).astype(np.float32)
        low, high = float(numbers.min()), float(numbers.max())
        if not 0 <= low <= high <= white:
            raise ValueError(f"its numbers are {low:g} to {high:g}, expected 0 (black) to {white} (white): scale them")
        scaled = 1 - numbers / white if inverted else numbers / white
        if turned.mode != "F" and "transparency" in turned.info:  # the one number that is transparent
            scaled[numbers == turned.info["transparency"]] = 1.0
        return Image.fromarray((scaled * 255).round().astype(np.uint8))
    mode = "L" if turned.mode in GREY else "RGB"
    if turned.has_transparency_data:
        layers = turned.convert("RGBA")
        if layers.getchannel("A").getextrema()[0] != 255:
            _note_transparency()
        turned = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return turned if turned.mode == mode else turned.convert(mode)


def _find_white(image: ImageFile.ImageFile, tags: Any) -> int | None:
    """Return the number of a white pixel; None for 8 bits per channel, which PIL converts."""
    if image.mode.startswith("I;16"):
        return int(2 ** tags.get(BITS, (16,))[0] - 1)
    if image.mode == "I" and image.format != "PPM":  # PIL scales the numbers of PPM to 16 bits
        raise ValueError("its numbers are integers of 32 bits, or have a sign: save it with 8 or 16 bits per channel")
    return {"I": 2**16 - 1, "F": 1}.get(image.mode)


@cache
def _note_transparency() -> None:
    """Print once per process that transparent pixels become white."""
    if os.environ.get("RANK", "0") == "0":
        print("images have transparent pixels: they are shown on white", file=sys.stderr)


@contextmanager
def open_image(file: Path | bytes, *, formats: Collection[str] | None = None) -> Iterator[ImageFile.ImageFile]:
    """Yield an image file whose header PIL has read; errors inside the context, too, become ValueErrors naming the file.

    For the arguments see `read_image`.
    """
    try:
        names = None if formats is None else list(formats)
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=names) as image:
            yield image
    except MemoryError:
        raise
    except Exception as error:  # damaged files make PIL raise nearly anything
        name = describe_file(file, "image")
        raise ValueError(f"{name} cannot be read as an image: {' '.join(str(error).split())}") from error


def describe_file(file: Path | bytes, kind: str = "image") -> str:
    """Return the name of a file for messages."""
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind} of {len(file)} bytes" if isinstance(file, bytes) else str(file)


def compute_sort_key(path: Path) -> list[tuple[list[tuple[str, int]], str]]:
    """Return the key of natural order, in which `frame2.png` comes before `frame10.png`."""
    parts = (*path.parent.parts, path.stem, path.suffix)
    return [([(word, int(digits or -1)) for word, digits in re.findall("([^0-9]*)([0-9]*)", part)], part) for part in parts]


def pick_frames(count: int) -> list[int]:
    """Return the distinct indices of the first, middle and last frame of a video of `count` frames."""
    last = count - 1
    return sorted({0, last // 2, last})


def to_image(sample: Tensor, *, width: int, colour: bool = True) -> Image.Image:
    """Return an image tensor `[C, H, W]` in [0, 1] as a PIL image, enlarged by an integer factor to at most `width` pixels.

    Args:
        sample: image of 1 or 3 channels, or a video `[C, F, H, W]`, shown by its first, middle and last frame.
        width: largest width in pixels, unless the image itself is wider.
        colour: whether to convert an image of one channel to RGB.
    """
    if sample.ndim == 4:
        sample = torch.cat([sample[:, frame] for frame in pick_frames(sample.shape[1])], dim=-1)
    array = (sample.clamp(0, 1) * 255).round().byte().cpu().numpy()
    image = Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1))
    image = image.convert("RGB") if colour else image
    factor = max(width // image.width, 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
