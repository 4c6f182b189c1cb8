"""Prompts with images: base class of the adapters whose network sees images besides the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from fluvial.models.images import read_image
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.protocol import Cond
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_text


class Conditioned(Pipeline):
    """A pipeline whose prompts have images, which are encoded once with the text, and cached with it.

    Args:
        folder, options: see `Pipeline`.
        height, width: size of the samples in pixels, which the conditioning may depend on.
    """

    takes: tuple[str, ...]  # names of the images of a prompt, which are those of the pipeline's arguments
    lists: ClassVar[tuple[str, ...]] = ()  # arguments that take several images per prompt
    calls: ClassVar[tuple[str, ...]] = ()  # further arguments of the pipeline's call that are options here
    sized: ClassVar[tuple[str, ...]] = ("height", "width")  # sizes of a sample that are options here

    def __init__(self, folder: str | Path, *, height: int = 512, width: int = 512, **options: Any) -> None:
        super().__init__(folder, **options)
        self.size = (height, width)

    def encode(self, prompts: Sequence[TextPrompt]) -> Cond:
        """Return the conditioning of prompts with images, on the CPU.

        Raises:
            ValueError: a prompt is too long or lacks an image, or an image cannot be used; the message names the prompt.
        """
        for prompt in prompts:
            check_media(prompt, self.takes, self.lists)
        return super().encode(prompts)

    def _encoders(self) -> str:
        return f"{super()._encoders()} {self.image_encoder()} {self.seen_as()}"

    def seen_as(self) -> str:
        """Return the options that the encoding of images depends on, for the names of cached prompts."""
        return f"{self.size}"


def check_media(prompt: TextPrompt, takes: Sequence[str], lists: Sequence[str] = ()) -> None:
    """Raise ValueError if a prompt lacks one of the images of some names, or has several but of those in `lists`."""
    media = prompt.media if isinstance(prompt, MediaPrompt) else {}
    for name in takes:
        source, shown = media.get(name), get_text(prompt)[:40]
        if source is None:
            expected = "an image or a list of images" if name in lists else "an image"
            raise ValueError(f"prompt {shown!r} has no {name}: give its record a column {name} with {expected}")
        if isinstance(source, tuple) and name not in lists:
            raise ValueError(f"prompt {shown!r} has {len(source)} images in {name}, expected one")


def open_images(prompt: TextPrompt, takes: Sequence[str], lists: Sequence[str] = ()) -> list[Image.Image]:
    """Return the images of a prompt in the order of some names; ValueError if one is missing or cannot be read."""
    check_media(prompt, takes, lists)
    assert isinstance(prompt, MediaPrompt)
    sources = [prompt.media[name] for name in takes]
    return [read_image(one) for source in sources for one in (source if isinstance(source, tuple) else (source,))]
