"""Send samples to a server as image files, in batches, and read its replies: scores, NaN or one line."""

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
from fluvial.engines.extensions.wire.client import HttpClient, format_reply, in_threads
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.scoring.scores import LARGEST, describe, read_number, read_numbers
from fluvial.models.images import as_image

QUALITY = 95  # of JPEG, as published clients send it


def list_frames(sample: Tensor) -> list[Tensor]:
    """Return the frames `[C, H, W]` of a video `[C, F, H, W]`; an image is its only frame."""
    return list(sample.unbind(1)) if sample.ndim == 4 else [sample]


def pick_frames(sample: Tensor, most: int) -> list[Tensor]:
    """Return at most `most` evenly spaced frames of a sample, the first and the last among them."""
    every_frame = list_frames(sample)
    if len(every_frame) <= most:
        return every_frame
    steps = max(most - 1, 1)
    return [every_frame[round(number * (len(every_frame) - 1) / steps)] for number in range(most)]


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
    """Return a file as base64."""
    return base64.b64encode(file).decode("ascii")


def _encode(image: Tensor, size: int, *, colour: bool = True, **options: object) -> bytes:
    file, made = io.BytesIO(), as_image(image, width=1, colour=colour)
    if size:
        made = made.resize((size, size), Image.Resampling.BICUBIC)
    made.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


T = TypeVar("T")


def score_in_batches(
    images: Tensor,
    prompts: Sequence[str],
    scored: Callable[[Tensor, slice], Sequence[object]],
    *,
    server: HttpClient,
    batch: int,
) -> Tensor:
    """Return the scores `[B, ...]` of samples that are sent in batches, NaN for those of a batch that failed.

    Args:
        scored: function of some samples on the host, and their slice, that returns a number, or a list of as many numbers,
            for each.
        server: server that is asked; its `in_flight` is the largest number of calls at the same time.
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
    with in_threads(lambda part: scored(samples[part], part), parts, at_once=server.in_flight) as results:
        for place, result in results:
            if isinstance(result, RunError):
                failures[place] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                scores[place] = torch.tensor(list(result), dtype=torch.float32)
    if failures and not scores:
        raise failures[0]
    if failures:
        lost = sum(parts[place].stop - parts[place].start for place in failures)
        warnings.warn(f"{lost} of {count} samples have no score: {failures[min(failures)]}", RuntimeWarning, stacklevel=2)
    shape = next((tensor.shape[1:] for tensor in scores.values()), ())
    table = torch.full((count, *shape), torch.nan)
    for place, tensor in scores.items():
        table[parts[place]] = tensor
    return table


def read_field(reply: Any, name: str, kind: type[T], *, where: str) -> T:
    """Return a field of a reply, any JSON value, as a value of a type.

    Raises:
        RunError: the field has another type or is not there, or the reply reports an error in its place.
    """
    held = reply if isinstance(reply, dict) else {}
    try:
        return convert(held.get(name), kind, name=name)
    except WireError as error:
        said = held.get("error") or held.get("detail")
        text = said.get("message") if isinstance(said, dict) else said
        problem = (
            f"reports an error: {format_reply(str(text))}"
            if text
            else f"answered with another form: {format_reply(str(error))}"
        )
        raise RunError(f"{where} {problem}") from None


def read_scores(reply: Any, name: str, count: int, *, where: str) -> list[float]:
    """Return a field of a reply that is a list of one score per sample, NaN for a value that is no number.

    Raises:
        RunError: it is no list of that many values, or holds no numbers.
    """
    values: list[Any] = read_field(reply, name, list[Any], where=where)
    if len(values) != count:
        raise RunError(f"{where}: {name} has {len(values)} values, expected {count}, one per sample")
    if read_numbers(values) is None:
        raise RunError(f"{where} answered with another form: {name} is {describe(values)}, expected numbers")
    return [read_score(value) for value in values]


def read_score(value: Any) -> float:
    """Return a number as a score; NaN, which is no score, for all else, what is not finite, and more than `LARGEST`."""
    number = read_number(value)
    return number if number is not None and abs(number) <= LARGEST else math.nan


def check_positive(name: str, value: int) -> None:
    """Raise UsageError for an option below 1."""
    if value < 1:
        raise UsageError(name, value, "at least 1")
