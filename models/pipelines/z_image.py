"""Z-Image: one stream of image and text tokens; its network takes lists and the time 1 - sigma, and predicts x0 - eps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.host_values import read
from fluvial.models.pipelines.base import Pipeline
from fluvial.models.replay.media import TextPrompt, get_text


class ZImageCond(NamedTuple):
    """Conditioning of Z-Image's transformer; each prompt is cut to its length for the forward pass."""

    tokens: Tensor  # [B, L, D] Qwen3 embeddings, zero at padding tokens
    lengths: Tensor  # [B] int64, number of tokens of the prompt


class ZImage(Pipeline):
    """The model protocol over a ZImagePipeline: Z-Image and Z-Image-Turbo (arXiv 2511.22699).

    The guidance scale g means v_uncond + g (v - v_uncond) as for all models; the pipeline's `guidance_scale` is g - 1.

    The network takes each prompt without padding; its length also sets the positions of the image's tokens. So the host
    must know the lengths (`models.host_values`). The network pads to the longest prompt of the batch, so a sample's velocity
    depends on the other samples up to rounding.
    """

    pipeline = "ZImagePipeline"
    network = "ZImageTransformer2DModel"
    conditioning = ZImageCond
    block_lists = ("noise_refiner", "context_refiner", "layers")
    linspace = staticmethod(torch.linspace)
    text_lengths = (512, 512)
    prompt_layers = ("cap_embedder", "context_refiner.*")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    @property
    def positions(self) -> int:
        """Largest number of tokens along each side."""
        return min(self.config["axes_lens"][1:])

    def find_token_limit(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer, and the number of tokens that its chat template leaves for the prompt."""
        tokenizer = tokenizers.tokenizer
        # The arguments of the pipeline.
        chat = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        template = tokenizer.apply_chat_template([{"role": "user", "content": ""}], **chat)
        return tokenizer, self.text_tokens - len(tokenizer(template).input_ids)

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]` and lengths `[1]`."""
        (tokens,), _ = encoders.encode_prompt(
            get_text(prompt), device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.text_tokens
        )
        padded = nn.functional.pad(tokens, (0, 0, 0, self.text_tokens - len(tokens)))
        return {"tokens": padded[None], "lengths": torch.tensor([len(tokens)])}

    def count_prompt_tokens(self, cond: ZImageCond) -> Tensor:
        """Return the number of tokens of each prompt, `[B]`."""
        return cond.lengths

    def trim_cond(self, cond: ZImageCond, tokens: int) -> ZImageCond:
        """Return the conditioning with the first tokens of each prompt; the others never reach the network."""
        return ZImageCond(cond.tokens[:, :tokens], cond.lengths)

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: ZImageCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v `[B, C, H, W]`: the network takes 1 - sigma and returns -v."""
        texts = zip(cond.tokens.to(x.dtype), read(cond.lengths).tolist(), strict=True)
        out = module(
            list(x.unsqueeze(2)),  # videos of one frame
            (1000 - (sigma * 1000 if timestep is None else timestep)) / 1000,
            [tokens[:length] for tokens, length in texts],
            return_dict=False,
        )[0]
        return -torch.stack(out).squeeze(2)
