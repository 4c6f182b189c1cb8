"""Initial samples that are noise and an image: image to image, which takes the end of a schedule only.

A pipeline that starts from x = s eps + (1 - s) z, with the latents z of an image and the first noise level s, is a flow from
pure noise in other coordinates: with x = s y + (1 - s) z, y starts as eps, its levels are sigma / s, and its velocity is the
pipeline's own, because dx / d sigma = dy / d (sigma / s). So a rollout draws noise, as for any other model.
"""

from typing import NamedTuple

from torch import Tensor

from fluvial.models.replay.checks import refusal
from fluvial.models.replay.places import places_in_output

TOLERANCE = 1e-2  # relative error of the sum in the lowest precision


class Mixture(NamedTuple):
    """Noise that a scheduler has mixed with an image's latents, each `[B, ...]`."""

    image: Tensor
    noise: Tensor
    mixed: Tensor


class Start(NamedTuple):
    """Initial samples x = scale noise + offset."""

    scale: float
    noise: Tensor  # [B, *event]
    offset: Tensor  # [B, *event] float32


def start_of(pipeline: str, initial: Tensor, mixtures: list[Mixture], sigma: float) -> Start:
    """Return what initial samples `[B, *event]` at a noise level below 1 consist of.

    Raises:
        ReplayError: they are not noise mixed with an image by the scheduler.
    """
    for mixture in reversed(mixtures):
        if len(mixture.mixed) != len(initial) or mixture.noise.shape != mixture.mixed.shape:
            continue
        places = places_in_output(initial, mixture.mixed.to(initial.dtype))
        if places is None:
            continue
        image = mixture.image.expand_as(mixture.mixed)
        noise, latents = (places.gather(part.flatten(1)).float() for part in (mixture.noise, image))
        offset = (1 - sigma) * latents
        if (sigma * noise + offset - initial.float()).norm() <= TOLERANCE * initial.float().norm():
            return Start(sigma, noise, offset)
    raise refusal(pipeline, f"it starts at noise level {sigma:g}, from samples that are no noise mixed with an image")


def with_offset(x: Tensor, scale: float, offset: Tensor) -> Tensor:
    """Return the pipeline's samples `[B, *event]` of those that start as noise."""
    return (scale * x + offset.to(x.device)).to(x.dtype)


def without_offset(x: Tensor, scale: float, offset: Tensor) -> Tensor:
    """Return samples `[B, ..., *event]` in the coordinates that start as noise, see `with_offset`."""
    between = x.ndim - offset.ndim
    return (x - offset.to(x.device).reshape(len(offset), *[1] * between, *offset.shape[1:])) / scale


def taken_of(steps: int, strength: float) -> int:
    """Return the number of steps to ask a pipeline for, so that it takes `steps` of them at a strength.

    Raises:
        ValueError: no number gives as many.
    """
    for count in range(steps, 1000 * steps):
        if count - int(max(count - min(count * strength, count), 0)) == steps:
            return count
    raise ValueError(f"strength is {strength:g}, with which no schedule takes {steps} steps")
