"""Networks that `fluvial plan` knows: built on the meta device without weights, with inputs of a given resolution.

They are apart from `models.catalogue`, which must import without torch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Inputs that are stored per sample; the others are shared by all samples or computed in the forward pass.
CONDITIONING = ("encoder_hidden_states", "pooled_projections")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class ModelShape(NamedTuple):
    """Network of a published model, its inputs, and defaults for planning."""

    build: Callable[[], nn.Module]
    blocks: tuple[str, ...]  # names of the module lists of repeated blocks
    lora_targets: tuple[str, ...]
    inputs: Callable[[int, int], dict[str, Any]]  # (samples, resolution in pixels) -> keyword arguments of forward
    resolution: int | None = 1024  # default in pixels; None if the model has a single image size
    micro_batch: int = 1  # default


def _handwriting() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    from fluvial.models.handwriting.model import CONFIG

    return SD3Transformer2DModel(**CONFIG)


def _handwriting_inputs(samples: int, resolution: int) -> dict[str, Any]:
    return _inputs(samples, (1, 8, 32), text=(4, 14), pooled=40)


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    # stabilityai/stable-diffusion-3.5-medium, transformer/config.json; dual_attention_layers as in diffusers' source.
    return SD3Transformer2DModel(
        sample_size=128,
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )


def _sd3_inputs(samples: int, resolution: int) -> dict[str, Any]:
    # 77 CLIP tokens and 256 T5 tokens, diffusers' default.
    return _inputs(samples, (16, resolution // 8, resolution // 8), text=(333, 4096), pooled=2048)


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    # black-forest-labs/FLUX.1-dev, transformer/config.json: diffusers' defaults plus the guidance input.
    return FluxTransformer2DModel(guidance_embeds=True)


def _flux_inputs(samples: int, resolution: int) -> dict[str, Any]:
    tokens, text = (resolution // 16) ** 2, 512  # 2x2 packed latents; T5 tokens, diffusers' default
    return {
        **_inputs(samples, (tokens, 64), text=(text, 4096), pooled=768),
        "guidance": _empty(samples),
        "img_ids": _empty(tokens, 3),
        "txt_ids": _empty(text, 3),
    }


def _qwen() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel()  # Qwen/Qwen-Image, transformer/config.json: diffusers' defaults


def _qwen_inputs(samples: int, resolution: int) -> dict[str, Any]:
    side = resolution // 16
    # Up to 512 text tokens, diffusers' default.
    return {
        **_inputs(samples, (side * side, 64), text=(512, 3584), pooled=None),
        "img_shapes": [[(1, side, side)]] * samples,
    }


def _inputs(samples: int, latent: tuple[int, ...], *, text: tuple[int, int], pooled: int | None) -> dict[str, Any]:
    """Return the inputs common to all: latents, prompt embeddings, timesteps, and the pooled embedding if there is one."""
    return {
        "hidden_states": _empty(samples, *latent),
        "encoder_hidden_states": _empty(samples, *text),
        **({} if pooled is None else {"pooled_projections": _empty(samples, pooled)}),
        "timestep": _empty(samples),
    }


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


MODELS: dict[str, ModelShape] = {
    "handwriting": ModelShape(
        _handwriting,
        ("transformer_blocks",),
        (*ATTENTION, "net.0.proj", "net.2", "linear"),
        _handwriting_inputs,
        resolution=None,
        micro_batch=64,
    ),
    "sd3.5-medium": ModelShape(_sd3, ("transformer_blocks",), ATTENTION, _sd3_inputs),
    "flux.1-dev": ModelShape(_flux, ("transformer_blocks", "single_transformer_blocks"), ATTENTION, _flux_inputs),
    "qwen-image": ModelShape(_qwen, ("transformer_blocks",), ATTENTION, _qwen_inputs),
}


def blocks(model: ModelShape, module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network in the order they run."""
    return [block for name in model.blocks for block in module.get_submodule(name).children()]
