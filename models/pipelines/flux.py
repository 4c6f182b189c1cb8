"""FLUX.1: packed latents with positions, T5 tokens, a pooled CLIP embedding, and guidance as an input of the network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from fluvial.core.checks import check_number
from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pipelines.base import Pipeline, check_size, check_still, flow_schedule
from fluvial.models.protocol import Schedule

PATCH = 2  # latents per token along each side


class FluxCond(NamedTuple):
    """Conditioning of FLUX's transformer."""

    tokens: Tensor  # [B, L, D] T5 embeddings
    pooled: Tensor  # [B, P] pooled CLIP embedding
    guidance: Tensor  # [B] guidance scale that a distilled network takes as an input


class Flux(Pipeline):
    """The model protocol over a FluxPipeline: FLUX.1 dev, with distilled guidance, and schnell, without guidance.

    The transformer has no mask and attends to padding tokens, so train with the same `text_tokens` as at inference.

    Args:
        folder, options: see `Pipeline`.
        embedded_guidance: guidance input of a distilled network. Guidance by two forward passes is separate; dev needs none.
    """

    pipeline = "FluxPipeline"
    network = "FluxTransformer2DModel"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    text_lengths = (512, 512)
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    lora_targets = (*JOINT_ATTENTION, "net.0.proj", "net.2", "proj_mlp")

    def __init__(self, folder: str | Path, *, embedded_guidance: float = 3.5, **options: Any) -> None:
        super().__init__(folder, **options)
        check_number("flux", "embedded_guidance", embedded_guidance, low=0)
        self.embedded_guidance = embedded_guidance

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, height / s, width / s) for a VAE that scales by s.

        Raises:
            ValueError: height or width is not a multiple of 2 s.
        """
        check_still(frames)
        check_size(height, width, multiple=self.vae_scale * PATCH)
        return (self.config["in_channels"] // PATCH**2, height // self.vae_scale, width // self.vae_scale)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule: levels 1 to 1 / steps, shifted by the scheduler for the number of tokens."""
        tokens = (shape[-2] // PATCH) * (shape[-1] // PATCH)
        return flow_schedule(self.scheduler(), steps, tokens=tokens, sigmas=np.linspace(1.0, 1 / steps, steps).tolist())

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the T5 tokenizer and its limit."""
        return tokenizers.tokenizer_2, self.text_tokens

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]` and pooled `[1, P]`."""
        tokens, pooled, _ = encoders.encode_prompt(
            prompt, prompt_2=None, device=self.device, max_sequence_length=self.text_tokens
        )
        return {"tokens": tokens, "pooled": pooled}

    def cond(self, texts: Mapping[str, Tensor]) -> FluxCond:
        """Return the conditioning, with the guidance input of the network."""
        return FluxCond(**texts, guidance=torch.full((len(texts["pooled"]),), self.embedded_guidance))

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: FluxCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v `[B, C, H, W]`."""
        height, width = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        # Whole numbers, which no dtype rounds.
        place = torch.cartesian_prod(torch.arange(height, device=x.device), torch.arange(width, device=x.device))
        v = module(
            hidden_states=rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH),
            encoder_hidden_states=cond.tokens.to(x.dtype),
            pooled_projections=cond.pooled.to(x.dtype),
            timestep=(sigma * 1000 if timestep is None else timestep) / 1000,
            guidance=cond.guidance if self.config["guidance_embeds"] else None,
            img_ids=nn.functional.pad(place, (1, 0)),
            txt_ids=place.new_zeros(cond.tokens.shape[1], 3),
            return_dict=False,
        )[0]
        return rearrange(v, "b (h w) (c p q) -> b c (h p) (w q)", h=height, p=PATCH, q=PATCH)
