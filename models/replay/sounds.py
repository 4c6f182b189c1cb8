"""Sounds among the outputs of a pipeline: telling them from images, their rate, and drawings of them."""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
ALONE = RLock()  # rewards decode sounds on threads of their own, and a pipeline's run changes its scheduler
RATES = (
    ("vocoder", "output_sampling_rate"),
    ("vae", "sampling_rate"),
    ("vae", "sample_rate"),
)  # parts and settings that say the rate


class Output(NamedTuple):
    """The output of a pipeline for B samples: images or videos, sounds, or both."""

    images: Tensor | None  # [B, C, H, W] or [B, C, F, H, W], float in [0, 1]
    waves: Tensor | None  # [B, channels, n] float in [-1, 1]

    def draw(self, size: tuple[int, ...]) -> Tensor:
        """Return the images, or drawings of the sounds of a height and width if there are none."""
        if self.images is not None:
            return self.images
        assert self.waves is not None
        return drawings(self.waves, *size[:2])


def alone(run: Callable[P, R]) -> Callable[P, R]:
    """Return a function that shares a lock with all others returned here: one call runs at a time."""

    @wraps(run)
    def run_alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with ALONE:
            return run(*args, **kwargs)

    return run_alone


def split_output(returned: Any) -> Output:
    """Return the images and sounds of what a pipeline's call returned, a tuple of tensors.

    Images with a fourth channel, their opacity (Qwen-Image 2.1), are shown over white: rewards take red, green and blue.

    Raises:
        ValueError: there are neither images nor sounds.
    """
    images = waves = None
    parts = returned if isinstance(returned, tuple) else (returned,)
    for made in parts:
        if not isinstance(made, Tensor):
            continue
        if made.ndim > 3:
            images = (made.transpose(1, 2) if made.ndim == 5 else made).float().clamp(0, 1)
            if images.shape[1] == 4:
                images = images[:, :3] * images[:, 3:] + (1 - images[:, 3:])
        else:
            waves = (made if made.ndim == 3 else made[:, None]).float().clamp(-1, 1)
    if images is None and waves is None:
        raise ValueError(f"the output is {', '.join(type(made).__name__ for made in parts) or 'empty'}, expected tensors")
    return Output(images, waves)


def read_rate(pipe: Any) -> int | None:
    """Return the rate of a pipeline's sounds; None for a pipeline that makes none."""
    for part, name in RATES:
        rate = getattr(getattr(getattr(pipe, part, None), "config", None), name, None)
        if isinstance(rate, int):
            return rate
    return None


def drawings(waves: Tensor, height: int, width: int) -> Tensor:
    """Return a drawing of each sound, `[B, 1, height, width]` in [0, 1]: per column the range of its first channel."""
    count = waves.shape[-1]
    columns = torch.arange(width, device=waves.device) * count // width
    numbers = torch.arange(max(count // width, 1), device=waves.device)
    parts = waves[:, 0, (columns[:, None] + numbers).clamp(max=count - 1)]
    low, high = parts.amin(-1)[:, None], parts.amax(-1)[:, None]
    level = torch.linspace(1, -1, height, device=waves.device)[None, :, None]
    half = 1 / height
    return 1 - ((level >= low - half) & (level <= high + half)).float()[:, None]
