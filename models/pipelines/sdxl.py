"""Stable Diffusion XL: a UNet with two CLIP encoders and the image's size as an input."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fluvial.models.pipelines.unet import StableDiffusion


class StableDiffusionXL(StableDiffusion):
    """The model protocol over a StableDiffusionXLPipeline (arXiv 2307.01952), an epsilon-prediction model.

    With `force_zeros_for_empty_prompt` in the folder, the empty prompt is encoded to zeros, as in the pipeline without a
    negative prompt.
    """

    pipeline = "StableDiffusionXLPipeline"
    prompt_layers: ClassVar[tuple[str, ...]] = (*StableDiffusion.prompt_layers, "add_embedding")
    lora_targets: ClassVar[tuple[str, ...]] = (*StableDiffusion.lora_targets, "proj_in", "proj_out")

    def text(self, encoders: Any, prompt: str) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]` and pooled `[1, P]`."""
        encoders.tokenizer.model_max_length = encoders.tokenizer_2.model_max_length = self.text_tokens
        tokens, _, pooled, _ = encoders.encode_prompt(prompt, device=self.device, do_classifier_free_guidance=False)
        if not prompt and encoders.config.force_zeros_for_empty_prompt:
            tokens, pooled = torch.zeros_like(tokens), torch.zeros_like(pooled)
        return {"tokens": tokens, "pooled": pooled}
