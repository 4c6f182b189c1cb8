"""Requests of Flow-Factory and of UniRL as images, prompts and metadata: sizes are known before anything is decoded."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.extensions.servers.asgi import RequestError
from fluvial.models.images import open_image, read_image

FILES = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True)
class Limits:
    """Largest request.

    Args:
        most_bytes: bytes of the body.
        most_pixels: pixels of all its images and frames.
    """

    most_bytes: int = 64_000_000
    most_pixels: int = 128_000_000


class SampleToScore(NamedTuple):
    """A sample to score."""

    image: Tensor  # [3, H, W] uint8; of a video [3, F, H, W]
    prompt: Prompt  # with its metadata, and the image that it is conditioned on


class ScoreRequest(NamedTuple):
    """A sample of UniRL's format with the rewards that are asked for."""

    sample: SampleToScore
    rewards: tuple[str, ...]


class Compute(Struct, frozen=True):
    """A request of Flow-Factory to /compute; images and frames as base64."""

    prompt: Annotated[list[str], Meta(min_length=1)]
    image: list[str] | None = None
    video: list[list[str]] | None = None
    condition_images: list[Annotated[list[str], Meta(max_length=1)]] | None = None
    condition_videos: list[Any] | None = None


class Turn(Struct, frozen=True):
    """A turn of a history; only that of the last one is scored."""

    text: str | None = None
    image_b64: str | None = None
    video_b64: Any = None
    video_path: Any = None


class History(Struct, frozen=True):
    """A sample of UniRL's format."""

    history: Annotated[list[Turn], Meta(min_length=1)]
    required_rewards: Annotated[list[str], Meta(min_length=1)]
    metadata: dict[str, Any] | None = None


class Score(Struct, frozen=True):
    """A request of UniRL to /score."""

    requests: list[History]


def flow_factory(body: Compute, limits: Limits) -> list[SampleToScore]:
    """Return the samples of a request to /compute.

    Raises:
        RequestError: its fields do not go together, or its images have too many pixels.
    """
    if body.condition_videos:
        raise RequestError("condition_videos is set, and no reward here takes any")
    if bool(body.image) == bool(body.video):
        raise RequestError("the body has image and video, or none of them, expected one of them")
    name, files = ("image", [[file] for file in body.image]) if body.image else ("video", body.video or [])
    conditions = body.condition_images or [[]] * len(files)
    if not len(files) == len(body.prompt) == len(conditions):
        raise RequestError(f"the body has {len(body.prompt)} prompts and {len(files)} of {name}, expected as many of each")
    decoder = _Decoder(limits.most_pixels)
    samples = []
    for number, (text, frames, condition_files) in enumerate(zip(body.prompt, files, conditions, strict=True)):
        condition = decoder.check(condition_files[0], f"condition_images[{number}]") if condition_files else None
        decoded = [decoder.decode_image(frame, f"{name}[{number}]") for frame in frames]
        if not decoded or len({frame.shape for frame in decoded}) > 1:
            raise RequestError(f"{name}[{number}] has no frames, or frames of several sizes")
        image = decoded[0] if body.image else torch.stack(decoded, dim=1)
        samples.append(SampleToScore(image, Prompt(text, image=condition)))
    return samples


def unirl(body: Score, limits: Limits) -> list[ScoreRequest]:
    """Return the samples of a request to /score; of each history the last turn, as UniRL's rewards take it.

    Raises:
        RequestError: a sample has no image or no text, or the images have too many pixels.
    """
    decoder = _Decoder(limits.most_pixels)
    requests = []
    for number, request in enumerate(body.requests):
        turn, where = request.history[-1], f"requests[{number}].history[-1]"
        if turn.video_b64 is not None or turn.video_path is not None:
            raise RequestError(f"{where} has a video, expected image_b64: send the frames of videos to /compute")
        if turn.text is None or turn.image_b64 is None:
            raise RequestError(f"{where}.{'text' if turn.text is None else 'image_b64'} is missing")
        image = decoder.decode_image(turn.image_b64, f"{where}.image_b64")
        rewards = tuple(dict.fromkeys(request.required_rewards))
        requests.append(ScoreRequest(SampleToScore(image, Prompt(turn.text, metadata=request.metadata or {})), rewards))
    return requests


def batch_of(samples: Sequence[SampleToScore]) -> tuple[Tensor, list[Prompt]]:
    """Return samples of one shape as a reward takes them: images `[B, 3, H, W]` in [0, 1], or videos, and prompts."""
    return torch.stack([sample.image for sample in samples]).float() / 255, [sample.prompt for sample in samples]


class _Decoder:
    """Decodes the images of one request, as long as they have few enough pixels."""

    def __init__(self, most_pixels: int) -> None:
        self.most = self.left = most_pixels

    def decode_image(self, text: str, where: str) -> Tensor:
        """Return an image `[3, H, W]` of uint8."""
        data = self.check(text, where)
        try:
            array = np.array(read_image(data, formats=FILES).convert("RGB"))
        except ValueError as error:
            raise RequestError(f"{where} is a damaged image") from error
        return torch.from_numpy(array).permute(2, 0, 1)

    def check(self, text: str, where: str) -> bytes:
        """Return the file of an image whose header says that it is small enough."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"{where} is not base64") from None
        try:
            with open_image(data, formats=FILES) as image:
                self.left -= image.width * image.height
        except ValueError as error:
            raise RequestError(f"{where} is no image file, expected one of {', '.join(FILES)}") from error
        if self.left < 0:
            raise RequestError(f"the images have more than {self.most / 1e6:g} megapixels: send fewer at once", 413)
        return data
