"""Map from a pipeline's samples to its VAE's latents, found by probing: element, scale and offset of each latent.

Pipelines pack latents into tokens, scale and shift them. All of these are z[j] = scale[j] x[element[j]] + offset[j], which
can be inverted, so encoded images become samples without knowledge of the pipeline's code.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.models.replay.checks import build_error

BASE = 16  # base of the digits that indices are probed with: few enough that any dtype tells them apart
TOLERANCE = 0.02  # relative error of a probe, above the rounding of bfloat16


class LatentLayout(NamedTuple):
    """Map of a sample to the VAE's latents; each tensor is `[n]` for n latents."""

    element: Tensor  # index into the flat sample
    scale: Tensor
    offset: Tensor
    shape: tuple[int, ...]  # shape of the latents of one sample


def find_latent_layout(to_vae_input: Callable[[Tensor], Tensor], shape: tuple[int, ...], pipeline: str) -> LatentLayout:
    """Return the layout of a pipeline's latents.

    Args:
        to_vae_input: function from samples `[1, *shape]` to the VAE's input latents `[1, ...]`.
        shape: shape of one sample.
        pipeline: class of the pipeline, for messages.

    Raises:
        ValueError: the latents are not a scaled rearrangement of the sample.
    """
    count = torch.Size(shape).numel()

    def probe(values: Tensor) -> Tensor:
        return to_vae_input(values.view(1, *shape))[0]

    zeros = probe(torch.zeros(count))
    offset = zeros.flatten()
    scale = probe(torch.ones(count)).flatten() - offset
    varying = int((scale != 0).sum())
    if len(offset) != count or varying != count:
        raise build_error(
            pipeline,
            f"its VAE is given {len(offset)} latents, {varying} of them depend on the sample, expected {count}, as many as "
            "elements of the sample",
        )
    element = read_positions(
        lambda digits: ((probe(digits).flatten() - offset) / scale).nan_to_num().clamp(0, BASE - 1), count
    )
    layout = LatentLayout(element, scale, offset, tuple(zeros.shape))
    sample = torch.randn(count, generator=torch.Generator().manual_seed(0))
    probed = probe(sample).flatten()
    expected = scale * sample[element.clamp(max=count - 1)] + offset
    if (probed - expected).norm() > TOLERANCE * probed.norm() or len(element.unique()) != count:
        raise build_error(pipeline, "its VAE is given latents that are not a scaled rearrangement of samples")
    return layout


def read_positions(probe: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return for each output of a function that selects from `count` numbers the index of the number, by its digits."""
    index, digits = torch.arange(count), math.ceil(math.log(max(count, 2), BASE))
    units = [BASE**digit for digit in range(digits)]
    return sum((unit * probe((index // unit % BASE).float()).round().long().cpu() for unit in units), torch.tensor(0))


def to_samples(latents: Tensor, layout: LatentLayout, shape: tuple[int, ...]) -> Tensor:
    """Return the samples `[B, *shape]` that the pipeline turns into the given latents `[B, ...]`.

    Raises:
        ValueError: the latents do not have the layout's shape.
    """
    if tuple(latents.shape[1:]) != layout.shape:
        raise ValueError(f"the images give latents of {list(latents.shape[1:])}, expected {list(layout.shape)}")
    element, scale, offset = (tensor.to(latents.device) for tensor in layout[:3])
    flat = torch.empty_like(latents.flatten(1))
    flat[:, element] = (latents.flatten(1) - offset) / scale
    return flat.view(len(latents), *shape)


def capture_vae_input(vae: Any, run: Callable[[], object], pipeline: str) -> Tensor:
    """Return the VAE's input, on the host, when `run` makes the pipeline decode samples once.

    Raises:
        ValueError: the VAE is not called exactly once.
    """
    inputs: list[Tensor] = []
    decode, decode_before = vae.decode, vars(vae).get("decode")

    def record_input(z: Tensor, *args: Any, **options: Any) -> Any:
        inputs.append(z)
        return decode(z, *args, **options)

    vae.decode = record_input
    try:
        run()
    finally:
        del vae.decode
        if decode_before is not None:
            vae.decode = decode_before
    if len(inputs) != 1:
        raise build_error(pipeline, f"it calls its VAE {len(inputs)} times to decode samples, expected once")
    return inputs[0].float().cpu()
