"""Requests of Flow-Factory and of UniRL as images, prompts and metadata: sizes are known before anything is decoded."""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.serve.asgi import RequestError

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


class Sample(NamedTuple):
    """A sample to score."""

    image: Tensor  # [3, H, W] uint8; of a video [3, F, H, W]
    prompt: Prompt  # with its metadata, and the image that it is conditioned on


class ScoreRequest(NamedTuple):
    """A sample of UniRL's format with the rewards that are asked for."""

    sample: Sample
    rewards: tuple[str, ...]


def flow_factory(value: Any, limits: Limits) -> list[Sample]:
    """Return the samples of a request to /compute.

    Raises:
        RequestError: it has another form, or its images have too many pixels.
    """
    value = _typed(value, dict, "the body")
    prompts = _texts(value.get("prompt"), "prompt")
    images, videos, conditions = (value.get(name) for name in ("image", "video", "condition_images"))
    if value.get("condition_videos"):
        raise RequestError(400, "condition_videos is set, and no reward here takes any")
    if bool(images) == bool(videos):
        raise RequestError(400, "the body has image and video, or none of them, expected one of them")
    name, found = ("image", images) if images else ("video", videos)
    files = [
        [file] if images else _typed(file, list, f"video[{number}]") for number, file in enumerate(_typed(found, list, name))
    ]
    if len(files) != len(prompts) or (conditions and len(_typed(conditions, list, "condition_images")) != len(prompts)):
        raise RequestError(400, f"the body has {len(prompts)} prompts and {len(files)} of {name}, expected as many of each")
    decoder = _Decoder(limits.most_pixels)
    samples = []
    for number, (text, frames) in enumerate(zip(prompts, files, strict=True)):
        condition = None
        if conditions:
            given = _typed(conditions[number], list, f"condition_images[{number}]")
            if len(given) > 1:
                raise RequestError(400, f"condition_images[{number}] has {len(given)} images, expected one")
            condition = decoder.checked(given[0], f"condition_images[{number}]") if given else None
        decoded = [decoder.decoded(frame, f"{name}[{number}]") for frame in frames]
        if not decoded or len({frame.shape for frame in decoded}) > 1:
            raise RequestError(400, f"{name}[{number}] has no frames, or frames of several sizes")
        image = decoded[0] if images else torch.stack(decoded, dim=1)
        samples.append(Sample(image, Prompt(text, image=condition)))
    return samples


def unirl(value: Any, limits: Limits) -> list[ScoreRequest]:
    """Return the samples of a request to /score; of each history the last turn, as UniRL's rewards take it.

    Raises:
        RequestError: it has another form, or its images have too many pixels.
    """
    requests = _typed(_typed(value, dict, "the body").get("requests"), list, "requests")
    decoder = _Decoder(limits.most_pixels)
    found = []
    for number, request in enumerate(requests):
        where = f"requests[{number}]"
        request = _typed(request, dict, where)
        turns = _typed(request.get("history"), list, f"{where}.history")
        if not turns:
            raise RequestError(400, f"{where}.history is empty, expected a turn with text and image_b64")
        turn = _typed(turns[-1], dict, f"{where}.history[-1]")
        if turn.get("video_b64") is not None or turn.get("video_path") is not None:
            raise RequestError(400, f"{where} has a video, expected image_b64: send the frames of videos to /compute")
        text = _typed(turn.get("text"), str, f"{where}.history[-1].text")
        metadata = request.get("metadata")
        metadata = {} if metadata is None else _typed(metadata, dict, f"{where}.metadata")
        image = decoder.decoded(turn.get("image_b64"), f"{where}.history[-1].image_b64")
        rewards = _texts(request.get("required_rewards"), f"{where}.required_rewards")
        found.append(ScoreRequest(Sample(image, Prompt(text, metadata=metadata)), tuple(dict.fromkeys(rewards))))
    return found


def batch_of(samples: Sequence[Sample]) -> tuple[Tensor, list[Prompt]]:
    """Return samples of one shape as a reward takes them: images `[B, 3, H, W]` in [0, 1], or videos, and prompts."""
    return torch.stack([sample.image for sample in samples]).float() / 255, [sample.prompt for sample in samples]


class _Decoder:
    """Decodes the images of one request, as long as they have few enough pixels.

    Args:
        most_pixels: pixels of all images together.
    """

    def __init__(self, most_pixels: int) -> None:
        self.most = self.left = most_pixels

    def decoded(self, text: Any, where: str) -> Tensor:
        """Return an image `[3, H, W]` of uint8."""
        data = self.checked(text, where)
        try:
            with Image.open(io.BytesIO(data), formats=FILES) as image:
                array = np.array(image.convert("RGB"))
        except Exception as error:  # damaged files make PIL raise nearly anything
            raise RequestError(400, f"{where} is a damaged image") from error
        return torch.from_numpy(array).permute(2, 0, 1)

    def checked(self, text: Any, where: str) -> bytes:
        """Return the file of an image whose header says that it is small enough."""
        try:
            data = base64.b64decode(_typed(text, str, where), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(400, f"{where} is not base64") from None
        try:
            with Image.open(io.BytesIO(data), formats=FILES) as image:  # reads the header alone
                pixels = image.width * image.height
        except Exception as error:
            raise RequestError(400, f"{where} is no image file, expected one of {', '.join(FILES)}") from error
        self.left -= pixels
        if self.left < 0:
            raise RequestError(413, f"the images have more than {self.most / 1e6:g} megapixels: send fewer at once")
        return data


def _texts(value: Any, where: str) -> list[str]:
    """Return a list of texts with at least one."""
    found = _typed(value, list, where)
    if not found or not all(isinstance(text, str) for text in found):
        raise RequestError(400, f"{where} is empty, or holds what is no text, expected a list of texts")
    return found


def _typed(value: Any, kind: type, where: str) -> Any:
    """Return a value of a kind."""
    if not isinstance(value, kind):
        names: Mapping[type, str] = {dict: "an object", list: "a list", str: "text"}
        raise RequestError(400, f"{where} is {'missing' if value is None else 'of another type'}, expected {names[kind]}")
    return value
