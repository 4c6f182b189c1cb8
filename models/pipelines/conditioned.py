"""Prompts with images: base class of the adapters whose network sees images besides the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from fluvial.models.pipelines.base import Pipeline
from fluvial.models.protocol import Cond
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_text


class Conditioned(Pipeline):
    """A pipeline whose prompts have images, which are encoded and cached together with the text.

    Args:
        folder, options: see `Pipeline`.
        height, width: size of the samples in pixels; the conditioning may depend on it.
    """

    takes: tuple[str, ...]  # names of a prompt's images, which are arguments of the pipeline's call
    lists: ClassVar[tuple[str, ...]] = ()  # arguments that take several images per prompt
    calls: ClassVar[tuple[str, ...]] = ()  # further arguments of the pipeline's call that are options here
    sized: ClassVar[tuple[str, ...]] = ("height", "width")  # sizes of a sample that are options here

    def __init__(self, folder: str | Path, *, height: int = 512, width: int = 512, **options: Any) -> None:
        super().__init__(folder, **options)
        self.size = (height, width)

    def encode(self, prompts: Sequence[TextPrompt]) -> Cond:
        """Return the conditioning of prompts with images, on the CPU.

        Raises:
            ValueError: a prompt is too long or lacks an image, or an image is not suitable; the message names the prompt.
        """
        for prompt in prompts:
            check_media(prompt, self.takes, self.lists)
        return super().encode(prompts)

    def _fingerprint_encoders(self) -> str:
        return f"{super()._fingerprint_encoders()} {self.fingerprint_image_encoder()} {self.describe_image_options()}"

    def describe_image_options(self) -> str:
        """Return the options that the encoding of images depends on, for the keys of cached prompts."""
        return f"{self.size}"


def check_media(prompt: TextPrompt, takes: Sequence[str], lists: Sequence[str] = ()) -> None:
    """Raise ValueError if a prompt lacks one of the named images, or has several of a name that is not in `lists`."""
    media = prompt.media if isinstance(prompt, MediaPrompt) else {}
    for name in takes:
        source, start = media.get(name), get_text(prompt)[:40]
        if source is None:
            expected = "an image or a list of images" if name in lists else "an image"
            raise ValueError(f"prompt {start!r} has no {name}: give its record a column {name} with {expected}")
        if isinstance(source, tuple) and name not in lists:
            raise ValueError(f"prompt {start!r} has {len(source)} images in {name}, expected one")


def open_images(prompt: TextPrompt, takes: Sequence[str], lists: Sequence[str] = ()) -> list[Image.Image]:
    """Return the named images of a prompt in order; ValueError if one is missing or cannot be read."""
    check_media(prompt, takes, lists)
    assert isinstance(prompt, MediaPrompt)
    files = prompt.open_files()
    return [one for name in takes for one in (files[name] if isinstance(files[name], list) else (files[name],))]
