"""Prompts with images: what a pipeline is given besides the text, by the names of its arguments."""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

Source = Path | bytes  # image file, or the bytes of one

# Names of diffusers' arguments that are images.
IMAGES = (
    "image",
    "mask_image",
    "control_image",
    "control_mask",
    "last_image",
    "reference_image",
    "image_reference",
    "ip_adapter_image",
)


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images; two are equal if their texts and the contents of their images are.

    Args:
        text: the prompt.
        media: image of each argument of the pipeline's call, as a file or its bytes.
    """

    text: str
    media: Mapping[str, Source]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MediaPrompt) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        """Return the text with the digest of each image: the key of caches."""
        return "\n".join((self.text, *(f"{name} {digest(self.media[name])}" for name in sorted(self.media))))

    def opened(self) -> dict[str, Any]:
        """Return the images by argument, as PIL images."""
        return {name: open_image(source) for name, source in self.media.items()}


TextPrompt = str | MediaPrompt


def text_of(prompt: TextPrompt) -> str:
    """Return the text of a prompt with or without images."""
    return prompt if isinstance(prompt, str) else prompt.text


def arguments_of(model: Any) -> tuple[str, ...]:
    """Return the arguments that the images of a model's prompts are; none for a model of text alone.

    They are those of the prompt that a pipeline was recorded on, or else those that the model takes (`takes`), in the order
    of `IMAGES`, then others by name.
    """
    example = getattr(model, "example", None)
    names = getattr(model, "takes", ()) if example is None else () if isinstance(example, str) else example.media
    return tuple(sorted(names, key=lambda name: (name not in IMAGES, IMAGES.index(name) if name in IMAGES else 0, name)))


def media_of(prompt: TextPrompt) -> dict[str, Any]:
    """Return the images of a prompt by argument, as PIL images; none for plain text."""
    return {} if isinstance(prompt, str) else prompt.opened()


def open_image(source: Source) -> Image.Image:
    """Return an image in colour, or in grey if it is stored so, turned as it is seen.

    Raises:
        ValueError: the file cannot be read as an image; the message names it.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            turned = ImageOps.exif_transpose(opened)
            return turned.copy() if turned.mode == "L" else turned.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        shown = f"an image of {len(source)} bytes" if isinstance(source, bytes) else str(source)
        raise ValueError(f"{shown} cannot be read as an image: {' '.join(str(error).split())}") from error


def digest(source: Source) -> str:
    """Return the SHA-256 of an image file's bytes."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    status = source.stat()
    return _digest_of_file(source, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=65536)
def _digest_of_file(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def as_png(image: Image.Image) -> bytes:
    """Return an image as the bytes of a PNG file."""
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()


def inverted(image: Image.Image) -> Image.Image:
    """Return an image of the same size whose pixels all differ: its negative, upside down."""
    return ImageOps.flip(ImageOps.invert(image))


def use_modes(vae: Any) -> None:
    """Make a VAE's samples of encoded images the mode of the distribution, so that they depend on no generator."""
    encode = vae.encode

    def to_mode(*args: Any, **kwargs: Any) -> Any:
        output = encode(*args, **kwargs)
        distribution = getattr(output, "latent_dist", None)
        if distribution is None and isinstance(output, tuple) and hasattr(output[0], "mode"):
            distribution = output[0]
        if distribution is not None:
            distribution.sample = lambda generator=None: distribution.mode()
        return output

    vae.encode = to_mode
