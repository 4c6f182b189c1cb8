"""Tiny pipelines of diffusers with random weights, built in place and saved as folders: one row an architecture."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fluvial.models.flux import Flux
from fluvial.models.folder import quietly
from fluvial.models.pipeline import Pipeline
from fluvial.models.sd3 import SD3

TEXT = 30  # tokens that a prompt is padded to


class Row(NamedTuple):
    """An architecture, and what its adapter is held to."""

    adapter: Callable[..., Pipeline]  # the class
    make: Callable[[], Any]  # the tiny pipeline of diffusers
    call: Callable[[float], dict[str, Any]]  # what diffusers' pipeline is called with for a scale of guidance
    prompts: tuple[str, ...] = ("a red fox", "two cats", "9 owls in 1 barn, at night")
    sizes: tuple[tuple[int, int], ...] = ((16, 16), (16, 24), (32, 8))  # height and width in pixels
    masks: bool = False  # whether the network leaves out the tokens that pad a prompt
    # Ends of the names of parameters that get no gradient, because what they compute is thrown away.
    idle: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  # of the adapter, besides
    latents: Callable[[Tensor], Tensor] = torch.clone  # initial noise as diffusers' pipeline takes it


def clip_tokenizer(length: int = 77) -> Any:
    """A CLIP tokenizer that knows the printable characters one by one."""
    from transformers import CLIPTokenizer

    characters = [*string.ascii_lowercase, *string.digits, *".,!"]
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{letter}</w>" for letter in characters)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def t5_tokenizer(length: int = 512) -> Any:
    """A T5 tokenizer that knows characters."""
    from transformers import T5Tokenizer

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -2.0)]
    vocabulary += [(letter, -3.0) for letter in [*string.ascii_lowercase, *string.digits, *".,!"]]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=length)


def clip_encoder(projected: bool = True, *, width: int = 8) -> Any:
    """A CLIP text encoder of two layers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer()), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, projection_dim=width, max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def t5_encoder(*, width: int = 16) -> Any:
    """A T5 encoder of two layers."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(t5_tokenizer()), d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return T5EncoderModel(config)


def vae(channels: int = 4) -> Any:
    """An image autoencoder that halves height and width once."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels, norm_num_groups=2, layers_per_block=1, scaling_factor=1.5, shift_factor=0.06,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def sd3() -> Any:
    """SD3.5 medium, tiny: with norms of queries and keys, and a second attention in one block."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=8, caption_projection_dim=16, joint_attention_dim=16, pooled_projection_dim=16,
        pos_embed_max_size=16, qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae(),
        text_encoder=clip_encoder(), tokenizer=clip_tokenizer(), text_encoder_2=clip_encoder(), tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


def sd3_without_t5() -> Any:
    """SD3 as it is used without its largest encoder, on a schedule that the size of the picture moves."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipeline = sd3()
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    moving = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 99}
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(**moving)
    return pipeline


def flux(*, distilled: bool = True) -> Any:
    """FLUX.1, tiny: the guidance-distilled model (dev), or without guidance as an input (schnell)."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4), guidance_embeds=distilled,
    )  # fmt: skip
    moving = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 99} if distilled else {}
    return FluxPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(**moving), vae=vae(),
        text_encoder=clip_encoder(projected=False), tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(), tokenizer_2=t5_tokenizer(),
    )  # fmt: skip


def classifier_free(scale: float) -> dict[str, Any]:
    """How most pipelines are asked for guidance away from the empty prompt."""
    return {"guidance_scale": scale, "negative_prompt": ""}


def true_guidance(scale: float) -> dict[str, Any]:
    """How pipelines are asked for it whose networks have a guidance of their own."""
    return {"guidance_scale": 2.5, "true_cfg_scale": scale, "negative_prompt": ""}


def packed(x: Tensor) -> Tensor:
    """Latents as FLUX's pipeline takes them: a row for each 2 x 2 of them."""
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


# The last block of SD3 drops the text's tokens after attention.
SD3_IDLE = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q")

ROWS: dict[str, Row] = {
    "sd3": Row(SD3, sd3, classifier_free, idle=SD3_IDLE),
    "sd3-without-t5": Row(SD3, sd3_without_t5, classifier_free, idle=SD3_IDLE),
    "flux": Row(Flux, flux, true_guidance, options={"embedded_guidance": 2.5}, latents=packed),
    "flux-schnell": Row(Flux, lambda: flux(distilled=False), true_guidance, latents=packed),
}


def save(row: Row, folder: Path) -> Path:
    """Save a row's pipeline, the same whenever it is called, with every weight drawn at random."""
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(0)
        pipeline = row.make()
        # What starts at zero or at one would hide what depends on it.
        for name in ("transformer", "vae"):
            for parameter in getattr(pipeline, name).parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        pipeline.save_pretrained(folder)
    return folder
