"""A reward for runs in this process: it notes the metadata that it is given, and can be told to fail."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

SEEN: list[dict[str, Any]] = []
FAILS_AT: list[int] = []  # number of the call that raises, the first being 1
CALLS: list[int] = []


def counted(images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
    """Score brightness, times a number that the record of the prompt holds."""
    CALLS.append(len(prompts))
    if len(CALLS) in FAILS_AT:
        raise RuntimeError("out of paper")
    SEEN.extend(metadata)
    return images.flatten(1).mean(1).cpu() * images.new_tensor([float(record["count"]) for record in metadata]).cpu()


def bright(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.flatten(1).mean(1).cpu()
