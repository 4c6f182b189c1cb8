"""FLUX.1: packed latents with positions, T5 tokens, a pooled CLIP embedding, and guidance as an input of the network."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pipelines.base import PATCH, Pipeline


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
        embedded_guidance: guidance input of a distilled network, 3.5 by default; dev needs no guidance by two passes.
    """

    pipeline = "FluxPipeline"
    network = "FluxTransformer2DModel"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    packed = True
    calls = ("embedded_guidance",)  # options that a run sets by `pipeline.call`
    linspace = staticmethod(np.linspace)
    text_lengths = (512, 512)
    encoding: ClassVar[dict[str, Any]] = {"prompt_2": None}
    encoded = ("tokens", "pooled", "")
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    lora_targets = (*JOINT_ATTENTION, "net.0.proj", "net.2", "proj_mlp")

    def __init__(self, folder: str | Path, *, embedded_guidance: float | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        if embedded_guidance is not None and not self.config["guidance_embeds"]:
            raise ValueError(f"embedded_guidance is {embedded_guidance}, but its network takes no guidance: remove it")
        self.embedded_guidance = scale = 3.5 if embedded_guidance is None else embedded_guidance
        if type(scale) not in (int, float) or not 0 <= scale < math.inf:
            raise ValueError(f"embedded_guidance is {scale}, expected a number of at least 0")

    def find_token_limit(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the T5 tokenizer and its limit."""
        return tokenizers.tokenizer_2, self.text_tokens

    def build_cond(self, texts: Mapping[str, Tensor]) -> FluxCond:
        """Return the conditioning, with the guidance input of the network."""
        return FluxCond(**texts, guidance=torch.full((len(texts["pooled"]),), self.embedded_guidance))

    def build_inputs(self, x: Tensor, timestep: Tensor, cond: Any) -> dict[str, Any]:
        """See `Pipeline.build_inputs`; the network takes timesteps from 0 to 1."""
        rows, columns = (torch.arange(side // PATCH, device=x.device) for side in x.shape[-2:])
        positions = torch.cartesian_prod(rows, columns)  # integers, which no dtype rounds
        return {
            "timestep": timestep / 1000,
            "pooled_projections": cond.pooled.to(x.dtype),
            "guidance": cond.guidance if self.config["guidance_embeds"] else None,
            "img_ids": nn.functional.pad(positions, (1, 0)),
            "txt_ids": positions.new_zeros(cond.tokens.shape[1], 3),
        }
