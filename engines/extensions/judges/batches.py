"""Batches of samples for a reward server: encoding as image files, concurrent requests, and parsing of replies."""

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.wire.client import HttpClient, format_reply, run_in_threads
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.scoring.scores import LARGEST, describe, read_number, read_numbers
from fluvial.models.images import to_image

QUALITY = 95  # of JPEG, as published clients send it


def list_frames(sample: Tensor) -> list[Tensor]:
    """Return the frames `[C, H, W]` of a video `[C, F, H, W]`; an image is its only frame."""
    return list(sample.unbind(1)) if sample.ndim == 4 else [sample]


def pick_frames(sample: Tensor, most: int) -> list[Tensor]:
    """Return at most `most` evenly spaced frames of a sample, including the first and the last."""
    frames = list_frames(sample)
    if len(frames) <= most:
        return frames
    steps = max(most - 1, 1)
    return [frames[round(number * (len(frames) - 1) / steps)] for number in range(most)]


def encode_png(image: Tensor, *, size: int = 0, colour: bool = True) -> bytes:
    """Return an image `[C, H, W]` in [0, 1] as a PNG file, resized to `size` x `size` pixels unless that is 0.

    Args:
        colour: whether to convert an image of one channel to RGB.
    """
    return _encode(image, size, colour=colour, format="PNG")


def encode_jpeg(image: Tensor, *, quality: int = QUALITY) -> bytes:
    """Return an image `[C, H, W]` in [0, 1] as a JPEG file."""
    return _encode(image, 0, format="JPEG", quality=quality)


def to_base64(file: bytes) -> str:
    """Return the bytes of a file as base64."""
    return base64.b64encode(file).decode("ascii")


def _encode(image: Tensor, size: int, *, colour: bool = True, **options: object) -> bytes:
    file, pixels = io.BytesIO(), to_image(image, width=1, colour=colour)
    if size:
        pixels = pixels.resize((size, size), Image.Resampling.BICUBIC)
    pixels.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


T = TypeVar("T")


def score_in_batches(
    images: Tensor,
    prompts: Sequence[str],
    score_batch: Callable[[Tensor, slice], Sequence[object]],
    *,
    server: HttpClient,
    batch: int,
) -> Tensor:
    """Return the scores of samples `[B, ...]`, requested in batches; NaN for the samples of a batch that failed.

    Args:
        score_batch: function of samples on the host and their slice; it returns a number per sample, or a list of numbers,
            of the same length for all samples.
        server: server to send requests to; its `in_flight` limits the number of concurrent calls.
        batch: largest number of samples per call.

    Raises:
        RunError: all batches failed; the error is that of the first.
    """
    count = len(images)
    if count != len(prompts):
        raise RunError(f"{count} images came with {len(prompts)} prompts, expected one prompt per image")
    samples = images.detach().cpu().float()
    parts = [slice(start, min(start + batch, count)) for start in range(0, count, batch)]
    scores, failures = dict[int, Tensor](), dict[int, RunError]()
    with run_in_threads(lambda part: score_batch(samples[part], part), parts, at_once=server.in_flight) as results:
        for number, result in results:
            if isinstance(result, RunError):
                failures[number] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                scores[number] = torch.tensor(list(result), dtype=torch.float32)
    if failures and not scores:
        raise failures[0]
    if failures:
        lost = sum(parts[number].stop - parts[number].start for number in failures)
        warnings.warn(f"{lost} of {count} samples have no score: {failures[min(failures)]}", RuntimeWarning, stacklevel=2)
    shape = next((tensor.shape[1:] for tensor in scores.values()), ())
    table = torch.full((count, *shape), torch.nan)
    for number, tensor in scores.items():
        table[parts[number]] = tensor
    return table


def read_field(reply: Any, name: str, kind: type[T], *, where: str) -> T:
    """Return a field of a JSON reply, converted to a type.

    Args:
        where: address of the server, for messages.

    Raises:
        RunError: the field is missing or has another type, or the reply reports an error instead.
    """
    fields = reply if isinstance(reply, dict) else {}
    try:
        return convert(fields.get(name), kind, name=name)
    except WireError as error:
        stated = fields.get("error") or fields.get("detail")
        text = stated.get("message") if isinstance(stated, dict) else stated
        problem = (
            f"reports an error: {format_reply(str(text))}"
            if text
            else f"answered with another form: {format_reply(str(error))}"
        )
        raise RunError(f"{where} {problem}") from None


def read_scores(reply: Any, name: str, count: int, *, where: str) -> list[float]:
    """Return a field of a reply that lists one score per sample; NaN for a value that is not a number.

    Raises:
        RunError: it is not a list of `count` values, or holds no numbers.
    """
    values: list[Any] = read_field(reply, name, list[Any], where=where)
    if len(values) != count:
        raise RunError(f"{where}: {name} has {len(values)} values, expected {count}, one per sample")
    if read_numbers(values) is None:
        raise RunError(f"{where} answered with another form: {name} is {describe(values)}, expected numbers")
    return [read_score(value) for value in values]


def read_score(value: Any) -> float:
    """Return a number as a score; NaN (no score) for other values, numbers beyond `LARGEST` and infinities."""
    number = read_number(value)
    return number if number is not None and abs(number) <= LARGEST else math.nan


def check_positive(name: str, value: int) -> None:
    """Raise UsageError for an option below 1."""
    if value < 1:
        raise UsageError(name, value, "at least 1")
