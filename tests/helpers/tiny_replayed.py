"""Tiny random pipelines of diffusers that are replayed without an adapter: one row per architecture."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import stored
import torch
from einops import rearrange
from tiny_pipelines import flux, sd3
from torch import Tensor

from fluvial.models.tiny.encoders import gemma_encoder, gemma_tokenizer, qwen_tokenizer, t5_tokenizer, umt5_encoder, vae
from fluvial.models.tiny.encoders import settings as qwen_settings

PROMPTS = ["a red fox", "two cats", "an owl"]


class Row(NamedTuple):
    """One architecture: how to build and call its pipeline, and the layers that LoRA adapts."""

    make: Callable[[], Any]
    options: dict[str, Any]
    targets: tuple[str, ...]
    latents: Callable[[Tensor], Tensor] = torch.clone  # initial noise in the pipeline's layout, given that of its scheduler
    returns_samples: bool = True  # whether the pipeline returns latents in its scheduler's layout


def sana() -> Any:
    """Build Sana: one call for both halves of guidance, a mask of text tokens, and samples in float32."""
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel

    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=16,
        sample_size=8,
    )
    blocks = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in [
            ("block_types", ("ResBlock", "ResBlock")),
            ("block_out_channels", (4, 8)),
            ("qkv_multiscales", ((), ())),
            ("layers_per_block", (1, 1)),
        ]
    }
    autoencoder = AutoencoderDC(latent_channels=4, attention_head_dim=2, scaling_factor=0.5, **blocks)
    return SanaPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=gemma_encoder(),
        vae=autoencoder,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def lumina2() -> Any:
    """Build Lumina 2: two calls, norm-preserving guidance, a velocity of the other sign, and time 1 - sigma."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    transformer = Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )
    return Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(),
        text_encoder=gemma_encoder(),
        tokenizer=gemma_tokenizer(),
    )


def aura_flow() -> Any:
    """Build AuraFlow: one call for both halves of guidance, and time between 0 and 1."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    return AuraFlowPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(),
        vae=vae(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def flux2() -> Any:
    """Build FLUX.2 klein: packed latents with positions, several layers of the text encoder, and a VAE with a batch norm."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(2, 2, 2, 2),
        timestep_guidance_channels=8,
        guidance_embeds=False,
    )
    autoencoder = AutoencoderKLFlux2(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
    )
    return Flux2KleinPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder,
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**qwen_settings(16), head_dim=8)),
        tokenizer=qwen_tokenizer(),
    )


def unpacked(x: Tensor) -> Tensor:
    """Return samples `[B, H W, C]` of square images as `[B, C, H, W]`."""
    return rearrange(x, "b (h w) c -> b c h w", h=round(x.shape[1] ** 0.5))


SIZE = {"height": 16, "width": 16}
LARGE = {"height": 32, "width": 32}  # the smallest size that some take
WITHOUT_ADAPTER = ("sana", "lumina2", "aura-flow", "flux2")
ATTENTION = ("to_q", "to_k", "to_v")

ROWS: dict[str, Row] = {
    "sana": Row(
        sana,
        {
            **LARGE,
            "guidance_scale": 4.5,
            "use_resolution_binning": False,
            "complex_human_instruction": None,
            "max_sequence_length": 24,
        },
        ATTENTION,
    ),
    "lumina2": Row(lumina2, {**LARGE, "guidance_scale": 4.0, "system_prompt": "", "max_sequence_length": 24}, ATTENTION),
    "aura-flow": Row(aura_flow, {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 24}, ATTENTION),
    "flux2": Row(
        flux2,
        {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 32, "text_encoder_out_layers": [0, 1, 2]},
        ATTENTION,
        latents=unpacked,
        returns_samples=False,
    ),
    "sd3": Row(sd3, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 12}, ATTENTION),
    "flux": Row(flux, {**SIZE, "guidance_scale": 2.5, "max_sequence_length": 12}, ATTENTION),
    "flux-guided": Row(
        flux,
        {**SIZE, "guidance_scale": 2.5, "true_cfg_scale": 3.0, "negative_prompt": "bad", "max_sequence_length": 12},
        ATTENTION,
    ),
}


def load(name: str, folder: Path) -> Any:
    """Return a row's pipeline, loaded from a folder; if there is none, save it there first, with random weights."""
    from diffusers import DiffusionPipeline

    if not folder.exists():
        stored.copy_of(f"replayed-{name}", folder, partial(_make, ROWS[name]))
    loaded = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _make(row: Row, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = row.make()
        # Weights that start at zero or one would hide errors.
        for part in ("transformer", "vae"):
            for parameter in getattr(pipeline, part).parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    pipeline.save_pretrained(folder)
