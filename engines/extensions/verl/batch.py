"""Batches of verl: checked access to the fields, and the flat set of items."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError
from fluvial.models import Cond


class ItemBatch(NamedTuple):
    """N = B T items, in the order of the steps: item t B + i is sample i at step t."""

    samples: int  # B
    steps: int  # T
    items: dict[str, Tensor]  # [N, ...], inputs of a forward pass: x, level, timestep, sample (row of `cond`) and more
    cond: Cond  # conditioning of each sample, a pytree of tensors `[B, ...]`
    numbers: dict[str, Tensor]  # [N, ...], fields that the loss function reads
    uid: list[Any] | None = None  # [N], group of each item
    width: int = 1  # number of adjacent items that must stay in one micro-batch

    @property
    def size(self) -> int:
        """Number of items."""
        return self.samples * self.steps


class BatchFields:
    """Fields of verl's TensorDict of B samples, with errors of one line."""

    def __init__(self, data: Any) -> None:
        self.data, self.samples = data, len(data)
        if not self.samples:
            raise UsageError("the batch has no samples, expected at least one")

    def read_plain(self, name: str, default: Any = None) -> Any:
        """Return the value of a non-tensor field, or the default."""
        from tensordict.tensorclass import NonTensorData, NonTensorStack  # takes seconds to import

        value = self.data.get(name, None)
        if isinstance(value, NonTensorStack):
            return value.tolist()
        value = value.data if isinstance(value, NonTensorData) else value
        return default if value is None else value

    def has_tensor(self, name: str) -> bool:
        """Return whether a field is a tensor."""
        return isinstance(self.data.get(name, None), Tensor)

    def read_tensor(self, name: str, expected: Sequence[int | None] = (), *, what: str = "") -> Tensor:
        """Return a tensor; UsageError if it is missing or has another shape.

        Args:
            name: name of the field.
            expected: its first dimensions; None is any size. Of a jagged tensor only the first one is checked.
            what: description of these dimensions, for the message.
        """
        value = self.data.get(name, None)
        if not isinstance(value, Tensor):
            names = ", ".join(sorted(str(key) for key in self.data.keys() if self.has_tensor(str(key))))  # noqa: SIM118
            raise UsageError(f"the batch has no tensor {name}: it holds {names or 'none'}")
        shape = tuple(value.shape[: len(expected)]) if not value.is_nested else (value.shape[0],)
        known = tuple(expected) if not value.is_nested else tuple(expected[:1])
        if len(shape) < len(known) or any(size not in (None, width) for size, width in zip(known, shape, strict=True)):
            wanted = ", ".join("*" if size is None else str(size) for size in expected)
            raise UsageError(f"{name} has shape {list(value.shape)}, expected [{wanted}, ...]{what and f': {what}'}")
        return value

    def read_prompts(self, argument: str) -> list[Prompt]:
        """Return the prompt of each sample, from `raw_prompt` and `raw_negative_prompt`: texts, or chat messages.

        Args:
            argument: argument of the pipeline's call for the images of the messages.

        Raises:
            UsageError: the prompts are missing, or an image is not a path, bytes or a PIL image.
        """
        texts, opposed = (self.read_plain(f"raw_{name}") for name in ("prompt", "negative_prompt"))
        if not isinstance(texts, list) or len(texts) != self.samples:
            kind = type(texts).__name__ if not isinstance(texts, list) else f"{len(texts)} values"
            raise UsageError(f"raw_prompt is {kind}, expected one prompt per sample, which this model encodes itself")
        if opposed and len(opposed) != self.samples:
            raise UsageError(f"raw_negative_prompt has {len(opposed)} values, expected one per sample, {self.samples}")
        prompts = []
        for prompt, negative in zip(texts, opposed or [None] * self.samples, strict=True):
            text, images = read_messages(prompt)
            media: Any = {argument: images[0] if len(images) == 1 else tuple(images)} if images else {}
            prompts.append(Prompt(text, None if negative is None else read_messages(negative)[0], media=media))
        return prompts

    def read_items(self, name: str, steps: int, *, exact: bool = False) -> Tensor:
        """Return a field `[B, T, ...]` as one value per item, `[T B, ...]`.

        Args:
            exact: require `[B, T]` finite numbers.

        Raises:
            UsageError: the field is missing or has another shape, or a number is not finite.
        """
        value = self.read_tensor(name, (self.samples, steps), what="one value per sample and step")
        if exact and value.ndim != 2:
            raise UsageError(f"{name} has shape {list(value.shape)}, expected [{self.samples}, {steps}]")
        if exact and not bool(torch.isfinite(value).all()):
            raise UsageError(f"{name} holds a number that is not finite")
        return flatten_steps(value)

    def read_padded(self, name: str, *, masked: bool) -> Tensor:
        """Return a tensor `[B, L, ...]`; a jagged one is padded with zeros.

        Raises:
            UsageError: rows have different lengths, and the network does not mask padding (`masked`).
        """
        value = self.read_tensor(name, (self.samples,), what="one row per sample")
        if not value.is_nested:
            return value
        lengths = list_lengths(value)
        if not masked and len(set(lengths)) > 1:
            raise UsageError(
                f"{name} has rows of {min(lengths)} to {max(lengths)} tokens, and the model attends to padding: pass the "
                "embeddings as the rollout had them, with their padding"
            )
        # `to_padded_tensor` would pad to a cached length, or without one to the sum of the lengths.
        return pad_sequence(list(value.unbind()), batch_first=True)


def read_messages(content: Any) -> tuple[str, list[Path | bytes]]:
    """Return the text and the images of a prompt; of a chat those of the user's messages."""
    if isinstance(content, str):
        return content, []
    contents = [message["content"] for message in content if message["role"] == "user"]
    texts = [
        each if isinstance(each, str) else "".join(part["text"] for part in each if part["type"] == "text").strip()
        for each in contents
    ]
    parts = [part for each in contents if not isinstance(each, str) for part in each if part["type"] == "image"]
    return "\n".join(texts), [_read_image(part["image"]) for part in parts]


def _read_image(image: Any) -> Path | bytes:
    from PIL.Image import Image

    image = image.get("bytes") or image.get("path") if isinstance(image, dict) else image
    if isinstance(image, Image):
        with io.BytesIO() as file:
            image.save(file, "PNG")
            return file.getvalue()
    if not isinstance(image, str | bytes):
        raise UsageError(f"raw_prompt has an image of type {type(image).__name__}, expected a path, bytes or a PIL image")
    return image if isinstance(image, bytes) else Path(image.removeprefix("file://"))


def list_lengths(value: Tensor) -> list[int]:
    """Return the length of each row of a tensor, jagged or not."""
    return [len(row) for row in value.unbind()]


def flatten_steps(value: Tensor) -> Tensor:
    """Flatten values `[B, T, ...]` to `[T B, ...]`, the first step first."""
    return value.transpose(0, 1).flatten(0, 1)


def unflatten_steps(value: Tensor, batch: ItemBatch) -> Tensor:
    """Reshape values of items, `[T B, ...]`, to `[B, T, ...]`."""
    return value.unflatten(0, (batch.steps, batch.samples)).transpose(0, 1)
