"""Stable Diffusion 3 and 3.5: joint attention over text and image, with two CLIP encoders and T5."""

from typing import Any, ClassVar

from torch import Tensor

from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pipelines.base import Pipeline


class SD3(Pipeline):
    """The model protocol over a StableDiffusion3Pipeline (arXiv 2403.03206).

    The tokens of both CLIP encoders are joined along the last dimension, followed by the tokens of T5. The folder may lack
    T5; its embeddings are zeros then. The transformer has no mask and attends to padding tokens, so train with the same
    `text_tokens` as at inference.
    """

    pipeline = "StableDiffusion3Pipeline"
    network = "SD3Transformer2DModel"
    block_lists = ("transformer_blocks",)
    text_lengths = (256, 512)
    encoding: ClassVar[dict[str, Any]] = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    encoded = ("tokens", "", "pooled", "")
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    # As Flow-GRPO's scripts: the second attention of the dual blocks of SD3.5 medium (attn2) is not adapted.
    lora_targets = tuple(f"attn.{layer}" for layer in JOINT_ATTENTION)

    @property
    def patch(self) -> int:
        """Latents per token of the network along each side."""
        return int(self.config["patch_size"])

    @property
    def positions(self) -> int:
        """Largest number of tokens along each side."""
        return int(self.config["pos_embed_max_size"])

    def find_token_limit(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the T5 tokenizer, or a CLIP tokenizer if there is no T5, and its limit."""
        if tokenizers.tokenizer_3 is not None:
            return tokenizers.tokenizer_3, self.text_tokens
        return tokenizers.tokenizer, tokenizers.tokenizer.model_max_length

    def build_inputs(self, x: Tensor, timestep: Tensor, cond: Any) -> dict[str, Any]:
        """See `Pipeline.build_inputs`."""
        return {"timestep": timestep, "pooled_projections": cond.pooled.to(x.dtype)}
