"""Layouts of latents on a server of sglang: some of its pipelines denoise tokens, or videos of one frame."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.models.pipelines.base import Pipeline, pack, unpack
from fluvial.models.protocol import DiffusionModel


class Layout(NamedTuple):
    """Layout of the latents of a model."""

    of_event: Callable[[Tensor], Tensor]  # latents [..., *event] in this layout
    to_event: Callable[[Tensor, tuple[int, ...]], Tensor]  # its inverse, which is given the shape of the event

    def shape(self, event: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's latents in this layout."""
        return tuple(self.of_event(torch.empty(event, device="meta")).shape)


PLAIN = Layout(lambda x: x, lambda latents, event: latents)
TOKENS = Layout(pack, lambda latents, event: unpack(latents, event[-2]))  # [H W / 4, 4 C]
FRAME = Layout(lambda x: x.unsqueeze(-3), lambda latents, event: latents.squeeze(-3))  # [C, 1, H, W]
# By diffusers' pipeline: sglang 0.5.23, multimodal_gen/configs/pipeline_configs, `maybe_pack_latents` and
# `prepare_latent_shape`. Stable Diffusion 3 and Wan have the layout of diffusers.
LAYOUTS = {"FluxPipeline": TOKENS, "QwenImagePipeline": TOKENS, "ZImagePipeline": FRAME}


def layout_of(model: DiffusionModel) -> Layout:
    """Return the layout in which sglang denoises the samples of a model."""
    return LAYOUTS.get(model.pipeline, PLAIN) if isinstance(model, Pipeline) else PLAIN
