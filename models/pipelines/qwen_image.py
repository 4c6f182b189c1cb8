"""Qwen-Image: packed latents, masked tokens of a vision-language model, and guidance that keeps the norm of each token."""

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.random import Key
from fluvial.models.host_values import to_device
from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pipelines.base import PATCH, Pipeline, pack, unpack
from fluvial.models.replay.media import TextPrompt, get_text


class QwenCond(NamedTuple):
    """Conditioning of Qwen-Image's transformer."""

    tokens: Tensor  # [B, L, D] Qwen2.5-VL embeddings, zero at padding tokens
    mask: Tensor  # [B, L] bool, true at the tokens of the prompt


class QwenImage(Pipeline):
    """The model protocol over a QwenImagePipeline (arXiv 2508.02324).

    A prompt is padded to `text_tokens` and the padding is masked, so that it can be trimmed (`models.padding`). The pipeline
    pads to the longest prompt of the batch, so images agree up to rounding.
    """

    pipeline = "QwenImagePipeline"
    network = "QwenImageTransformer2DModel"
    conditioning: ClassVar[type] = QwenCond
    block_lists = ("transformer_blocks",)
    packed = True
    linspace = staticmethod(np.linspace)
    text_lengths = (512, 1024)
    prompt_layers = ("txt_norm", "txt_in")
    lora_targets = JOINT_ATTENTION

    @property
    def vae_scale(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** len(self.vae_config["temperal_downsample"])  # the VAE's spelling

    def find_token_limit(self, tokenizers: Any) -> tuple[Any, int]:
        """Return the tokenizer, and the number of tokens that the template leaves for the prompt."""
        # The beginning of the template is dropped after encoding.
        template = tokenizers.tokenizer(tokenizers.prompt_template_encode.format("")).input_ids
        return tokenizers.tokenizer, self.text_tokens - (len(template) - tokenizers.prompt_template_encode_start_idx)

    def encode_text(self, encoders: Any, prompt: TextPrompt) -> dict[str, Tensor]:
        """Return tokens `[1, L, D]` and mask `[1, L]`."""
        options = {"device": self.device, "max_sequence_length": self.text_tokens}
        return self.pad_tokens(encoders.encode_prompt(get_text(prompt), **options)[0])

    def pad_tokens(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return tokens of a prompt `[1, l, D]`, padded to `text_tokens`, and the mask."""
        pad = self.text_tokens - tokens.shape[1]
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        return {"tokens": nn.functional.pad(tokens, (0, 0, 0, pad)), "mask": nn.functional.pad(mask, (0, pad))}

    def count_prompt_tokens(self, cond: QwenCond) -> Tensor:
        """Return the number of tokens of each prompt, `[B]`."""
        return cond.mask.sum(1)

    def trim_cond(self, cond: QwenCond, tokens: int) -> QwenCond:
        """Return the conditioning with the first tokens of each prompt."""
        return cond._replace(tokens=cond.tokens[:, :tokens], mask=cond.mask[:, :tokens])

    def build_inputs(self, x: Tensor, timestep: Tensor, cond: Any) -> dict[str, Any]:
        """See `Pipeline.build_inputs`; the network takes timesteps from 0 to 1."""
        return {
            "timestep": timestep / 1000,
            "encoder_hidden_states_mask": cond.mask,
            "img_shapes": [[(1, *get_token_grid(x)), *self.list_image_grids(cond)]] * len(x),
        }

    def list_image_grids(self, cond: Any) -> list[tuple[int, int, int]]:
        """Return frames, height and width, in tokens, of the images whose tokens follow the samples'."""
        return []

    def guide(self, v: Tensor, v_uncond: Tensor, scale: Tensor | float) -> Tensor:
        """Return the guided velocity, v_uncond + g (v - v_uncond), each token rescaled to the norm of v's token."""
        guided = pack(classifier_free(v, v_uncond, scale))
        length = torch.linalg.vector_norm(pack(v).to(guided.dtype), dim=-1, keepdim=True)
        ratio = length / torch.linalg.vector_norm(guided, dim=-1, keepdim=True)
        return unpack(guided * ratio, v.shape[-2])

    def decode(self, latents: Tensor) -> Tensor:
        """Return images `[B, 3, height, width]`, float in [0, 1]; the VAE takes each as a video of one frame."""
        mean, std = self._get_moments(latents)
        return self.decode_with_vae((latents * std + mean).unsqueeze(2)).squeeze(2)

    def encode_images(self, images: Tensor, *, key: Key | None = None) -> Tensor:
        """Return clean samples `[B, C, h, w]`, see `Pipeline.encode_images`."""
        mean, std = self._get_moments(images)
        return (self.encode_with_vae(images.unsqueeze(2), key).squeeze(2) - mean) / std

    def _get_moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the VAE's latents per channel, with a tensor's dtype and device."""
        config = self.vae.config
        moments = (torch.tensor(each, dtype=like.dtype) for each in (config.latents_mean, config.latents_std))
        mean, std = (to_device(values[:, None, None], like.device) for values in moments)
        return mean, std


def get_token_grid(latents: Tensor) -> tuple[int, int]:
    """Return height and width of latents `[..., H, W]` in tokens."""
    return latents.shape[-2] // PATCH, latents.shape[-1] // PATCH
