"""Prompts with images, videos and sounds, by the names of the pipeline's arguments that take them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from fluvial.models.digests import digest_file
from fluvial.models.replay.kinds import ARGUMENTS, File, find_kind, list_frames

MediaSource = File | tuple[File, ...]  # file of one argument; several for an argument that takes a list of images


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images, videos or sounds; prompts are equal if their texts and the contents of their files are equal.

    Args:
        text: the prompt.
        media: file, or its bytes, by argument of the pipeline's call; several for a list of images.
    """

    text: str
    media: Mapping[str, MediaSource]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MediaPrompt) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        """Return the text with the digest of each file: the key of caches."""
        return "\n".join((self.text, *(f"{name} {digest_source(self.media[name])}" for name in sorted(self.media))))

    def open_files(self) -> dict[str, Any]:
        """Return by argument a PIL image in colour (or a mask), a list of images (of a video or several), or a `Sound`."""
        return {name: _read_source(name, source) for name, source in self.media.items()}

    def change(self, *names: str) -> "MediaPrompt":
        """Return the prompt with other images, videos or sounds of the same sizes for the named arguments."""
        return MediaPrompt(self.text, {**self.media, **{name: _change_source(name, self.media[name]) for name in names}})


TextPrompt = str | MediaPrompt


def get_text(prompt: TextPrompt) -> str:
    """Return the text of a prompt with or without media."""
    return prompt if isinstance(prompt, str) else prompt.text


def list_arguments(model: Any) -> tuple[str, ...]:
    """Return the names of the media in a model's prompts; none for a model of text alone.

    They are those of the prompt that a pipeline was recorded on, or else the model's `takes`, in the order of
    `kinds.ARGUMENTS`, then others by name.
    """
    example = getattr(model, "example", None)
    names = getattr(model, "takes", ()) if example is None else () if isinstance(example, str) else example.media
    known = {name: number for number, name in enumerate(ARGUMENTS)}
    return tuple(sorted(names, key=lambda name: (known.get(name, len(known)), name)))


def find_list_arguments(model: Any) -> set[str]:
    """Return the arguments of a model that take a list of images."""
    example = getattr(model, "example", None)
    if isinstance(example, MediaPrompt):
        return {name for name, source in example.media.items() if isinstance(source, tuple)}
    return {*getattr(model, "lists", ())}


def get_media(prompt: TextPrompt) -> dict[str, Any]:
    """Return the images, videos and sounds of a prompt by argument, see `MediaPrompt.open_files`; none for plain text."""
    return {} if isinstance(prompt, str) else prompt.open_files()


def _read_source(argument: str, source: MediaSource) -> Any:
    if isinstance(source, tuple):
        return [_read_source(argument, file) for file in source]
    read = find_kind(argument, source).read(source)
    # Only masks may be grey: a VAE takes three channels.
    return read.convert("RGB") if isinstance(read, Image.Image) and "mask" not in argument else read


def _change_source(argument: str, source: MediaSource) -> MediaSource:
    if isinstance(source, tuple):
        return tuple(_change_file(argument, file) for file in source)
    return _change_file(argument, source)


def _change_file(argument: str, file: File) -> bytes:
    kind = find_kind(argument, file)
    return kind.write(kind.change(kind.read(file)))


def digest_source(source: MediaSource) -> str:
    """Return the SHA-256 of a file, of each of several files, or of the frames of a folder."""
    if isinstance(source, tuple):
        return " ".join(map(digest_source, source))
    if isinstance(source, Path) and source.is_dir():
        return digest_file(" ".join(map(digest_file, list_frames(source))).encode())
    return digest_file(source)


def use_modes(vae: Any) -> None:
    """Make a VAE encode images to the mode of its distribution instead of a sample, so that no generator has an effect.

    Inputs are cast to the VAE's dtype, because some pipelines (Lucy Edit) pass float32.
    """
    encode = vae.encode

    def encode_to_mode(*args: Any, **kwargs: Any) -> Any:
        cast = [arg.to(vae.dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        output = encode(*cast, **kwargs)
        distribution = getattr(output, "latent_dist", None)
        if distribution is None and isinstance(output, tuple) and hasattr(output[0], "mode"):
            distribution = output[0]
        if distribution is not None:
            distribution.sample = lambda generator=None: distribution.mode()
        return output

    vae.encode = encode_to_mode
