"""Sounds in the output of a pipeline: their sampling rate, and drawings of their waves."""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
PIPELINE_LOCK = RLock()  # rewards decode sounds on threads of their own, and a pipeline's run changes its scheduler
RATES = (
    ("vocoder", "output_sampling_rate"),
    ("vae", "sampling_rate"),
    ("vae", "sample_rate"),
)  # parts and settings that hold the rate


class Output(NamedTuple):
    """The output of a pipeline for B samples: images or videos, sounds, or both."""

    images: Tensor | None  # [B, C, H, W] or [B, C, F, H, W], float in [0, 1]
    waves: Tensor | None  # [B, channels, n] float in [-1, 1]

    def draw(self, size: tuple[int, ...]) -> Tensor:
        """Return the images; without images, drawings of the sounds of the given height and width."""
        if self.images is not None:
            return self.images
        assert self.waves is not None
        return draw_waves(self.waves, *size[:2])


def run_alone(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs a pipeline, so that one such call runs at a time in the process."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with PIPELINE_LOCK:
            return function(*args, **kwargs)

    return call


def split_output(returned: Any) -> Output:
    """Return the images and sounds among the tensors that a pipeline's call returned.

    Images with a fourth channel, their opacity (Qwen-Image 2.1), are composited over white: rewards take RGB.

    Raises:
        ValueError: there are neither images nor sounds.
    """
    images = waves = None
    parts = returned if isinstance(returned, tuple) else (returned,)
    for part in parts:
        if not isinstance(part, Tensor):
            continue
        if part.ndim > 3:
            images = (part.transpose(1, 2) if part.ndim == 5 else part).float().clamp(0, 1)
            if images.shape[1] == 4:
                images = images[:, :3] * images[:, 3:] + (1 - images[:, 3:])
        else:
            waves = (part if part.ndim == 3 else part[:, None]).float().clamp(-1, 1)
    if images is None and waves is None:
        raise ValueError(f"the output is {', '.join(type(part).__name__ for part in parts) or 'empty'}, expected tensors")
    return Output(images, waves)


def read_rate(pipe: Any) -> int | None:
    """Return the sampling rate of a pipeline's sounds; None if it makes no sounds."""
    for part, name in RATES:
        rate = getattr(getattr(getattr(pipe, part, None), "config", None), name, None)
        if isinstance(rate, int):
            return rate
    return None


def draw_waves(waves: Tensor, height: int, width: int) -> Tensor:
    """Return a drawing of each wave, `[B, 1, height, width]` in [0, 1]: the range of its first channel per column."""
    count = waves.shape[-1]
    columns = torch.arange(width, device=waves.device) * count // width
    numbers = torch.arange(max(count // width, 1), device=waves.device)
    parts = waves[:, 0, (columns[:, None] + numbers).clamp(max=count - 1)]
    low, high = parts.amin(-1)[:, None], parts.amax(-1)[:, None]
    level = torch.linspace(1, -1, height, device=waves.device)[None, :, None]
    half = 1 / height
    return 1 - ((level >= low - half) & (level <= high + half)).float()[:, None]
