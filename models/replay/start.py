"""Initial samples of image to image: noise mixed with an image, at a level in the middle of the schedule.

A pipeline that starts from x = s eps + (1 - s) z, with the latents z of an image and the first noise level s, is a flow from
pure noise in other coordinates: with x = s y + (1 - s) z, y starts as eps, its levels are sigma / s, and its velocity is the
pipeline's own, because dx / d sigma = dy / d (sigma / s). So a rollout draws noise, as for any other model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fluvial.models.replay.checks import build_error
from fluvial.models.replay.gather_maps import find_in_output

LEAST_STEPS = {"invert_sigmas": 3, "shift_terminal": 2}  # shortest schedules, by the scheduler's setting that needs them
TOLERANCE = 1e-2  # relative error of the sum in the lowest precision


class Mixture(NamedTuple):
    """Noise that a scheduler has mixed with an image's latents, each `[B, ...]`."""

    image: Tensor
    noise: Tensor
    mixed: Tensor


class LoopStart(NamedTuple):
    """Initial samples x = scale noise + offset."""

    scale: float
    noise: Tensor  # [B, *event]
    offset: Tensor  # [B, *event] float32


def find_start(
    pipeline: str, initial: Tensor, mixtures: list[Mixture], sigma: float, noiseless: Callable[[], Tensor]
) -> LoopStart | None:
    """Split initial samples `[B, *event]` at a noise level below 1 into noise and an offset; None if they are noise alone.

    Args:
        pipeline: class of the pipeline, for messages.
        initial: the samples.
        mixtures: mixtures that the scheduler has returned.
        sigma: the noise level.
        noiseless: function that returns the initial samples of a run with zeros for noise, for a pipeline that mixes noise
            and latents itself.

    Raises:
        ReplayError: the scheduler has mixed noise with an image, and the samples are none of its mixtures.
    """
    for mixture in reversed(mixtures):
        if len(mixture.mixed) != len(initial) or mixture.noise.shape != mixture.mixed.shape:
            continue
        gather_map = find_in_output(initial, mixture.mixed.to(initial.dtype))
        if gather_map is None:
            continue
        image = mixture.image.expand_as(mixture.mixed)
        noise, latents = (gather_map.gather(part.flatten(1)).float() for part in (mixture.noise, image))
        offset = (1 - sigma) * latents
        if (sigma * noise + offset - initial.float()).norm() <= TOLERANCE * initial.float().norm():
            return LoopStart(sigma, noise, offset)
    if mixtures:
        raise build_error(
            pipeline, f"it starts at noise level {sigma:g}, from samples that are not a mixture of noise and an image"
        )
    offset = noiseless().float()
    return LoopStart(sigma, (initial.float() - offset) / sigma, offset) if offset.any() else None


class ZeroNoise(TorchFunctionMode):
    """Mode in which torch draws zeros in place of normal noise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if func in (torch.randn, torch.randn_like) else result


def add_offset(x: Tensor, scale: float, offset: Tensor) -> Tensor:
    """Return scale x + offset, the pipeline's samples `[B, *event]`, computed in float64."""
    return (scale * x.double() + offset.to(x.device)).to(x.dtype)


def remove_offset(x: Tensor, scale: float, offset: Tensor) -> Tensor:
    """Invert `add_offset` for samples `[B, ..., *event]`."""
    between = x.ndim - offset.ndim
    moved = x.double() - offset.to(x.device).reshape(len(offset), *[1] * between, *offset.shape[1:])
    return (moved / scale).to(x.dtype)


def find_step_counts(steps: int, strength: float) -> tuple[int, ...]:
    """Return the candidate numbers of steps to request, so that a pipeline takes `steps` of them at a strength.

    Pipelines take n strength of n steps, rounded up or down.

    Raises:
        ValueError: no number of requested steps gives `steps`.
    """
    counts = [
        next(
            (count for count in range(steps, 1000 * steps) if count - int(count - rounded(count * strength)) == steps), None
        )
        for rounded in (float, int)
    ]
    if None in counts:
        raise ValueError(f"strength is {strength:g}, with which no schedule takes {steps} steps")
    return tuple(dict.fromkeys(count for count in counts if count is not None))


def find_least_steps(settings: Mapping[str, Any], strength: float) -> int:
    """Return the least number of steps to request from a pipeline that takes one of them at a strength.

    Args:
        settings: settings of its scheduler; some need longer schedules.
        strength: strength of image to image.
    """
    return next((least for name, least in LEAST_STEPS.items() if settings.get(name)), max(find_step_counts(1, strength)))
