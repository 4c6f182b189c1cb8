"""Stable Diffusion 3 and 3.5: joint attention over text and image, with two CLIP encoders and T5."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from fluvial.models.pipelines.base import Pipeline, check_size, check_still, flow_schedule
from fluvial.models.protocol import Schedule


class TextCond(NamedTuple):
    """Conditioning of SD3's transformer."""

    tokens: Tensor  # [B, 77 + L, D]: CLIP embeddings, both along the last dimension, then T5 embeddings
    pooled: Tensor  # [B, P] pooled embeddings of both CLIP encoders


class SD3(Pipeline):
    """The model protocol over a StableDiffusion3Pipeline (arXiv 2403.03206).

    The folder may lack T5; its embeddings are zeros then. The transformer has no mask and attends to padding tokens, so
    train with the same `text_tokens` as at inference.
    """

    pipeline = "StableDiffusion3Pipeline"
    network = "SD3Transformer2DModel"
    conditioning = TextCond
    block_lists = ("transformer_blocks",)
    text_lengths = (256, 512)
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    # As Flow-GRPO's scripts: the second attention of the dual blocks of SD3.5 medium (attn2) is not adapted.
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return (C, height / s, width / s) for a VAE that scales by s.

        Raises:
            ValueError: height or width is not a multiple of s times the patch, or has more patches than positions.
        """
        check_still(frames)
        scale, patch = self.vae_scale, self.config["patch_size"]
        check_size(height, width, multiple=scale * patch, most=scale * patch * self.config["pos_embed_max_size"])
        return (self.config["in_channels"], height // scale, width // scale)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        """Return the pipeline's schedule, which is its scheduler's default."""
        patch = self.config["patch_size"]
        return flow_schedule(self.scheduler(), steps, tokens=(shape[-2] // patch) * (shape[-1] // patch))

    def longest(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the T5 tokenizer, or a CLIP tokenizer if there is no T5, and its limit."""
        if tokenizers.tokenizer_3 is not None:
            return tokenizers.tokenizer_3, self.text_tokens
        return tokenizers.tokenizer, tokenizers.tokenizer.model_max_length

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return tokens `[1, 77 + L, D]` and pooled `[1, P]`."""
        tokens, _, pooled, _ = encoders.encode_prompt(
            prompt,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
        )
        return {"tokens": tokens, "pooled": pooled}

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: TextCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v `[B, C, H, W]`."""
        return module(
            hidden_states=x,
            encoder_hidden_states=cond.tokens.to(x.dtype),
            pooled_projections=cond.pooled.to(x.dtype),
            timestep=sigma * 1000 if timestep is None else timestep,
            return_dict=False,
        )[0]
