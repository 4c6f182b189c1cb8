"""Classifier-free guidance around any velocity model: what to guide away from is data, beside what to guide to."""

from typing import Literal, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.core.types import PerSample, Samples
from fluvial.models.protocol import Cond, DiffusionModel


class Guided(NamedTuple):
    """A batch's conditioning with guidance; a pytree of tensors like any other, so it is chunked and stored alike."""

    cond: Cond
    uncond: Cond  # of the negative prompts, of the same shapes
    scale: Tensor  # [B]


def guided_velocity(
    model: DiffusionModel,
    module: nn.Module,
    x: Samples,
    sigma: PerSample,
    cond: Cond,
    *,
    timestep: PerSample | None = None,
    forwards: Literal["one", "two"] = "one",
    gradient: Literal["both", "conditional"] = "both",
) -> Samples:
    """Return the velocity `[B, *event]` that a step is taken with: as the model guides, or v without guidance.

    Args:
        model, module: the adapter and its network.
        x, sigma, timestep: as `model.velocity` takes them.
        cond: the model's, or `Guided`.
        forwards: with guidance, put both halves through one forward pass of 2B samples, or through two, for memory.
        gradient: flows through both halves, or through the conditional one alone.

    Source: arXiv 2207.12598.
    """
    if not isinstance(cond, Guided):
        return model.predict(module, x, sigma, cond, timestep=timestep)
    if forwards == "one":
        both = optree.tree_map(lambda *halves: torch.cat(halves), cond.cond, cond.uncond)
        twice = None if timestep is None else timestep.repeat(2)
        v, v_uncond = model.predict(module, x.repeat(2, *[1] * (x.ndim - 1)), sigma.repeat(2), both, timestep=twice).chunk(2)
        v_uncond = v_uncond.detach() if gradient == "conditional" else v_uncond
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and gradient == "both"):
            v_uncond = model.predict(module, x, sigma, cond.uncond, timestep=timestep)
        v = model.predict(module, x, sigma, cond.cond, timestep=timestep)
    return model.guide(v, v_uncond, cond.scale)
