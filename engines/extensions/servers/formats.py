"""Request formats of Flow-Factory and UniRL. Image sizes are checked before anything is decoded."""

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
class ScoringLimits:
    """Largest request.

    Args:
        most_bytes: bytes of the body.
        most_pixels: pixels of all its images and frames.
    """

    most_bytes: int = 64_000_000
    most_pixels: int = 128_000_000


class SampleToScore(NamedTuple):
    """Sample to score."""

    image: Tensor  # [3, H, W] uint8; [3, F, H, W] for a video
    prompt: Prompt  # with its metadata and conditioning image


class ScoreRequest(NamedTuple):
    """Sample of UniRL's format with the requested rewards."""

    sample: SampleToScore
    rewards: tuple[str, ...]


class ComputeBody(Struct, frozen=True):
    """Body of Flow-Factory's request to /compute; images and frames are base64."""

    prompt: Annotated[list[str], Meta(min_length=1)]
    image: list[str] | None = None
    video: list[list[str]] | None = None
    condition_images: list[Annotated[list[str], Meta(max_length=1)]] | None = None
    condition_videos: list[Any] | None = None


class Turn(Struct, frozen=True):
    """Turn of a history; only the last one is scored."""

    text: str | None = None
    image_b64: str | None = None
    video_b64: Any = None
    video_path: Any = None


class History(Struct, frozen=True):
    """Sample of UniRL's format."""

    history: Annotated[list[Turn], Meta(min_length=1)]
    required_rewards: Annotated[list[str], Meta(min_length=1)]
    metadata: dict[str, Any] | None = None


class ScoreBody(Struct, frozen=True):
    """Body of UniRL's request to /score."""

    requests: list[History]


def read_flow_factory(body: ComputeBody, limits: ScoringLimits) -> list[SampleToScore]:
    """Read the samples of a request to /compute.

    Raises:
        RequestError: fields contradict each other, or the images have too many pixels.
    """
    if body.condition_videos:
        raise RequestError("condition_videos is set, which no reward takes: leave it out")
    if bool(body.image) == bool(body.video):
        raise RequestError("the body has both or neither of image and video, expected one of them")
    name, files = ("image", [[file] for file in body.image]) if body.image else ("video", body.video or [])
    conditions = body.condition_images or [[]] * len(files)
    if not len(files) == len(body.prompt) == len(conditions):
        raise RequestError(f"the body has {len(body.prompt)} prompts and {len(files)} of {name}, expected equal numbers")
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


def read_unirl(body: ScoreBody, limits: ScoringLimits) -> list[ScoreRequest]:
    """Read the samples of a request to /score: the last turn of each history, as in UniRL's rewards.

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


def stack_samples(samples: Sequence[SampleToScore]) -> tuple[Tensor, list[Prompt]]:
    """Stack samples of one shape: images `[B, 3, H, W]` in [0, 1], or videos, and prompts."""
    return torch.stack([sample.image for sample in samples]).float() / 255, [sample.prompt for sample in samples]


class _Decoder:
    """Decoder of the images of one request, with a limit of their pixels."""

    def __init__(self, most_pixels: int) -> None:
        self.most = self.left = most_pixels

    def decode_image(self, text: str, where: str) -> Tensor:
        """Decode an image to `[3, H, W]` uint8."""
        data = self.check(text, where)
        try:
            array = np.array(read_image(data, formats=FILES).convert("RGB"))
        except ValueError as error:
            raise RequestError(f"{where} is a damaged image") from error
        return torch.from_numpy(array).permute(2, 0, 1)

    def check(self, text: str, where: str) -> bytes:
        """Decode base64 to an image file, and check the size in its header."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"{where} is not base64") from None
        try:
            with open_image(data, formats=FILES) as image:
                self.left -= image.width * image.height
        except ValueError as error:
            raise RequestError(f"{where} is not an image file, expected one of {', '.join(FILES)}") from error
        if self.left < 0:
            raise RequestError(f"the images have more than {self.most / 1e6:g} megapixels: send fewer at once", 413)
        return data
