"""The arguments of a pipeline's call as text: short in messages, exact in a fingerprint."""

from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

UNSHOWN = ("output_type", "return_dict")  # arguments that the caller does not choose


def shown(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call in one line, for messages."""

    def short(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"tensor{list(value.shape)}"
        text = " ".join(repr(value).split())
        return text if len(text) <= 60 else f"{text[:60]}..."

    return ", ".join(f"{name}={short(value)}" for name, value in asked.items() if name not in UNSHOWN)


def exactly(asked: Mapping[str, Any]) -> str:
    """Return the arguments of a pipeline's call with all values of tensors and images, for a fingerprint."""

    def whole(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.tolist()}"
        return f"{value.size} {value.tobytes()!r}" if isinstance(value, Image.Image) else repr(value)

    return ", ".join(f"{name}={whole(value)}" for name, value in asked.items() if name not in UNSHOWN)
