"""The way from a pipeline's samples to its VAE, found by probing: which latent is which element, with scale and offset.

Pipelines pack latents into tokens, scale and shift them. All of these are z[j] = scale[j] x[place[j]] + offset[j], which can
be inverted, so that encoded images become samples without knowing the pipeline's code.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.models.replay.checks import refusal

BASE = 16  # of the digits that places are probed with: few enough that any dtype tells them apart
TOLERANCE = 0.02  # relative error of a probe, above the rounding of bfloat16


class LatentLayout(NamedTuple):
    """Scaling of a sample before the VAE decodes it; each tensor is `[n]` for n latents."""

    place: Tensor  # element of the flat sample
    scale: Tensor
    offset: Tensor
    shape: tuple[int, ...]  # of the latents of one sample


def latent_layout(vae_input: Callable[[Tensor], Tensor], shape: tuple[int, ...], pipeline: str) -> LatentLayout:
    """Return the layout of a pipeline's latents.

    Args:
        vae_input: function from samples `[1, *shape]` to the latents `[1, ...]` that the VAE is given.
        shape: shape of one sample.
        pipeline: class of the pipeline, for messages.

    Raises:
        ValueError: the latents are no scaled rearrangement of the sample.
    """
    count = torch.Size(shape).numel()

    def probe(values: Tensor) -> Tensor:
        return vae_input(values.view(1, *shape))[0]

    zeros = probe(torch.zeros(count))
    offset = zeros.flatten()
    scale = probe(torch.ones(count)).flatten() - offset
    varying = int((scale != 0).sum())
    if len(offset) != count or varying != count:
        raise refusal(
            pipeline,
            f"its VAE is given {len(offset)} latents, of which {varying} depend on the sample, expected {count}, as many as "
            "elements of the sample",
        )
    place = read_places(lambda digits: ((probe(digits).flatten() - offset) / scale).nan_to_num().clamp(0, BASE - 1), count)
    layout = LatentLayout(place, scale, offset, tuple(zeros.shape))
    sample = torch.randn(count, generator=torch.Generator().manual_seed(0))
    probed = probe(sample).flatten()
    expected = scale * sample[place.clamp(max=count - 1)] + offset
    if (probed - expected).norm() > TOLERANCE * probed.norm() or len(place.unique()) != count:
        raise refusal(pipeline, "its VAE is given latents that are no scaled rearrangement of samples")
    return layout


def read_places(probe: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return the element of `count` numbers that each output of a function of them is, from the digits of their places."""
    index, digits = torch.arange(count), math.ceil(math.log(max(count, 2), BASE))
    units = [BASE**digit for digit in range(digits)]
    return sum((unit * probe((index // unit % BASE).float()).round().long().cpu() for unit in units), torch.tensor(0))


def to_samples(latents: Tensor, layout: LatentLayout, shape: tuple[int, ...]) -> Tensor:
    """Return the samples `[B, *shape]` that the pipeline turns into the given latents `[B, ...]`.

    Raises:
        ValueError: the latents have another shape than those of the pipeline's size.
    """
    if tuple(latents.shape[1:]) != layout.shape:
        raise ValueError(f"the images give latents of {list(latents.shape[1:])}, expected {list(layout.shape)}")
    place, scale, offset = (tensor.to(latents.device) for tensor in layout[:3])
    flat = torch.empty_like(latents.flatten(1))
    flat[:, place] = (latents.flatten(1) - offset) / scale
    return flat.view(len(latents), *shape)


def vae_input(vae: Any, run: Callable[[], object], pipeline: str) -> Tensor:
    """Return what a VAE is given to decode, on the host, when `run` makes the pipeline decode samples once.

    Raises:
        ValueError: the VAE is not called just once.
    """
    seen: list[Tensor] = []
    decode, decode_before = vae.decode, vars(vae).get("decode")

    def watch(z: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(z)
        return decode(z, *args, **options)

    vae.decode = watch
    try:
        run()
    finally:
        del vae.decode
        if decode_before is not None:
            vae.decode = decode_before
    if len(seen) != 1:
        raise refusal(pipeline, f"it calls its VAE {len(seen)} times to decode samples, expected once")
    return seen[0].float().cpu()
