"""Tiny pipelines of diffusers with random weights, built in place and saved as folders: one row an architecture."""

import string
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from tiny_qwen import qwen3_encoder, qwen_tokenizer, qwen_vl_encoder
from torch import Tensor

from fluvial.models.pipelines.base import Pipeline
from fluvial.models.pipelines.flux import Flux
from fluvial.models.pipelines.folder import quietly
from fluvial.models.pipelines.qwen_image import QwenImage
from fluvial.models.pipelines.sd3 import SD3
from fluvial.models.pipelines.sdxl import StableDiffusionXL
from fluvial.models.pipelines.unet import StableDiffusion
from fluvial.models.pipelines.wan import Wan
from fluvial.models.pipelines.z_image import ZImage

TEXT = 40  # tokens that a prompt is padded to


class Row(NamedTuple):
    """An architecture, and what its adapter is held to."""

    adapter: Callable[..., Pipeline]  # the class
    make: Callable[[], Any]  # the tiny pipeline of diffusers
    call: Callable[[float], dict[str, Any]]  # what diffusers' pipeline is called with for a scale of guidance
    prompts: tuple[str, ...] = ("a red fox", "two cats", "9 owls in 1 barn, at night")
    sizes: tuple[tuple[int, ...], ...] = ((16, 16), (16, 24), (32, 8))  # height and width in pixels, and frames of a video
    masks: bool = False  # whether the network leaves out the tokens that pad a prompt
    # Ends of the names of parameters that get no gradient, because what they compute is thrown away.
    idle: tuple[str, ...] = ()
    variant: bool = False  # of an architecture that another row is of; together these rows are slow
    options: dict[str, Any] = {}  # noqa: RUF012  # of the adapter, besides
    latents: Callable[[Tensor], Tensor] = torch.clone  # initial noise as diffusers' pipeline takes it
    asked: Callable[[Tensor], dict[str, Any]] = lambda x: {"max_sequence_length": TEXT}  # with what besides, by that noise
    images: Callable[[Any], Tensor] = attrgetter("images")  # of what it returns
    scheduler: Callable[[Any], Any] | None = None  # in place of the pipeline's own, which it gets the settings of
    load_lora: Callable[[Any, Path], None] = lambda pipeline, folder: pipeline.load_lora_weights(folder)
    exact: bool = True  # whether the pipeline takes its steps by the same operations


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
    """SD3 as it is used without its largest encoder, on a schedule that the size of the image moves."""
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


def stable_diffusion(*, large: bool = False, predicts: str = "epsilon") -> Any:
    """Stable Diffusion, tiny: 1.5 with convolutions around attention, or XL with two text encoders and sizes as inputs."""
    from diffusers import (
        AutoencoderKL,
        EulerDiscreteScheduler,
        PNDMScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    xl = {
        "use_linear_projection": True, "transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 6 * 4 + 8,
    }  # fmt: skip
    unet = UNet2DConditionModel(
        in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16 if large else 8, attention_head_dim=2, **(xl if large else {}),
    )  # fmt: skip
    images = AutoencoderKL(
        block_out_channels=(4, 4, 8), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4, norm_num_groups=2, layers_per_block=1, scaling_factor=0.5,
    )  # fmt: skip
    betas = {
        "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1,
        "timestep_spacing": "leading", "prediction_type": predicts,
    }  # fmt: skip
    tokenizer, encoder = clip_tokenizer(TEXT), clip_encoder(projected=False)
    if large:
        return StableDiffusionXLPipeline(
            unet=unet, scheduler=EulerDiscreteScheduler(**betas), vae=images, text_encoder=encoder, tokenizer=tokenizer,
            text_encoder_2=clip_encoder(), tokenizer_2=clip_tokenizer(TEXT), add_watermarker=False,
        )  # fmt: skip
    return StableDiffusionPipeline(
        unet=unet, scheduler=PNDMScheduler(**betas, skip_prk_steps=True), vae=images, text_encoder=encoder,
        tokenizer=tokenizer, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def wan(*, experts: bool = False, a_token: bool = False) -> Any:
    """Wan 2.1, tiny, or 2.2 with two experts, or with a timestep a token; frames but the first, and sides, are halved."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    settings = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "text_dim": 16, "freq_dim": 16, "ffn_dim": 24, "num_layers": 2, "rope_max_seq_len": 32,
    }  # fmt: skip
    networks: dict[str, Any] = {"transformer": WanTransformer3DModel(**settings), "expand_timesteps": a_token}
    if experts:
        networks |= {"transformer_2": WanTransformer3DModel(**settings), "boundary_ratio": 0.8}
    videos = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=[-0.7, 0.1, 0.4, -0.2], latents_std=[2.8, 1.4, 0.8, 2.0], scale_factor_temporal=2,
        scale_factor_spatial=2,
    )  # fmt: skip
    text = UMT5Config(
        vocab_size=len(t5_tokenizer()), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return WanPipeline(
        **networks, vae=videos, text_encoder=UMT5EncoderModel(text), tokenizer=t5_tokenizer(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )  # fmt: skip


def qwen_image() -> Any:
    """Qwen-Image, tiny, on a schedule of its kind."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    transformer = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    videos = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[-0.7, 0.1, 0.4, 0.9], latents_std=[2.8, 1.4, 0.6, 1.9],
    )  # fmt: skip
    moving = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 99, "shift_terminal": 0.02}
    return QwenImagePipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(**moving), vae=videos,
        text_encoder=qwen_vl_encoder(), tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def z_image() -> Any:
    """Z-Image, tiny."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=16, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[2, 2, 4], axes_lens=[96, 32, 24],
    )  # fmt: skip
    return ZImagePipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae(),
        text_encoder=qwen3_encoder(), tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def classifier_free(scale: float) -> dict[str, Any]:
    """How most pipelines are asked for guidance away from the empty prompt."""
    return {"guidance_scale": scale, "negative_prompt": ""}


def true_guidance(scale: float) -> dict[str, Any]:
    """How pipelines are asked for it whose networks have a guidance of their own."""
    return {"guidance_scale": 2.5, "true_cfg_scale": scale, "negative_prompt": ""}


def norm_keeping(scale: float) -> dict[str, Any]:
    """How Qwen-Image's pipeline is asked for it."""
    return {"true_cfg_scale": scale}


def with_negatives(x: Tensor) -> dict[str, Any]:
    """For a pipeline that does not repeat a negative prompt."""
    return {"max_sequence_length": TEXT, "negative_prompt": [""] * len(x)}


def counted_from_none(scale: float) -> dict[str, Any]:
    """How a pipeline is asked for it in which 0, not 1, is no guidance."""
    return {"guidance_scale": scale - 1}


def packed(x: Tensor) -> Tensor:
    """Latents as FLUX's pipeline takes them: a row for each 2 x 2 of them."""
    return rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def without_negative(scale: float) -> dict[str, Any]:
    """How Stable Diffusion is asked for it; for XL's pipeline nothing and the empty prompt are two."""
    return {"guidance_scale": scale}


def ddim(settings: Any) -> Any:
    """The scheduler of the levels that a UNet's folder names, whose steps are those of the adapter."""
    from diffusers import DDIMScheduler

    return DDIMScheduler.from_config(settings, clip_sample=False)


def flow_euler(settings: Any) -> Any:
    """The scheduler of first order of Wan's levels."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=settings["flow_shift"])


def video(x: Tensor) -> dict[str, Any]:
    """How a pipeline is asked for videos of as many frames as initial noise is of."""
    return {"num_frames": 2 * x.shape[2] - 1, "max_sequence_length": TEXT}


def load_both(pipeline: Any, folder: Path) -> None:
    """Open the adapters of both experts."""
    pipeline.load_lora_weights(folder / "transformer")
    pipeline.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)


def nothing(x: Tensor) -> dict[str, Any]:
    """For a pipeline that is asked for nothing besides."""
    return {}


# The last block of SD3 drops the text's tokens after attention.
SD3_IDLE = ("transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.norm_added_q")

UNET = Row(
    StableDiffusion, stable_diffusion, without_negative, asked=nothing, scheduler=ddim, exact=False,
)  # fmt: skip

# The last block of Qwen-Image drops the text's.
QWEN_IDLE = tuple(
    f"transformer_blocks.1.{name}" for name in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
)
# One prompt is longer than the 32 tokens that Z-Image pads to, so a batch has two lengths; one size needs no padding.
Z_IMAGE: dict[str, Any] = {
    "prompts": ("a red fox", "two cats", "9 owls, 12345 mice, 67890 h"),
    "sizes": ((16, 16), (16, 24), (16, 32)),
}

FILMS = Row(
    Wan, wan, classifier_free, sizes=((16, 16, 5), (16, 32), (32, 16, 3)), asked=video, scheduler=flow_euler,
    images=lambda made: made.frames.transpose(1, 2),
)  # fmt: skip

ROWS: dict[str, Row] = {
    "sd3": Row(SD3, sd3, classifier_free, idle=SD3_IDLE),
    "sd3-without-t5": Row(SD3, sd3_without_t5, classifier_free, idle=SD3_IDLE, variant=True),
    "flux": Row(Flux, flux, true_guidance, options={"embedded_guidance": 2.5}, latents=packed),
    "flux-schnell": Row(Flux, lambda: flux(distilled=False), true_guidance, latents=packed, variant=True),
    "qwen-image": Row(
        QwenImage, qwen_image, norm_keeping, masks=True, idle=QWEN_IDLE, latents=packed, asked=with_negatives, exact=False
    ),
    "z-image": Row(ZImage, z_image, counted_from_none, masks=True, **Z_IMAGE),
    "sd1": UNET,
    "sd2-v": UNET._replace(make=lambda: stable_diffusion(predicts="v_prediction"), variant=True),
    "sdxl": UNET._replace(adapter=StableDiffusionXL, make=lambda: stable_diffusion(large=True)),
    "wan": FILMS,
    "wan-experts": FILMS._replace(make=lambda: wan(experts=True), load_lora=load_both, variant=True),
}


def save(row: Row, folder: Path) -> Path:
    """Save a row's pipeline, the same whenever it is called, with every weight drawn at random."""
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(0)
        pipeline = row.make()
        # What starts at zero or at one would hide what depends on it.
        for name in [name for name in ("transformer", "transformer_2", "unet", "vae") if pipeline.components.get(name)]:
            for parameter in getattr(pipeline, name).parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        pipeline.save_pretrained(folder)
    return folder
