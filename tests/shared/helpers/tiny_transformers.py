"""Small transformers of diffusers whose tokens can be split over ranks, with data and a loss."""

from collections.abc import Callable
from typing import Any

import torch
from helpers.tiny_models import Info
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.gathered import gather

ITEMS, WIDTH = 4, 8  # items of data; channels of the latents


def flux() -> nn.Module:
    """Build a FLUX transformer: one double and one single block of 2 heads."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=WIDTH,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=5,
        axes_dims_rope=(2, 2, 4),
    )


def qwen() -> nn.Module:
    """Build a Qwen-Image transformer: two blocks of 2 heads."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        in_channels=WIDTH,
        out_channels=WIDTH,
        patch_size=1,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        axes_dims_rope=(2, 2, 4),
    )


def wan() -> nn.Module:
    """Build a Wan transformer of videos: two blocks of 2 heads."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=WIDTH,
        out_channels=WIDTH,
        text_dim=6,
        freq_dim=8,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=16,
    )


def blocks(module: nn.Module) -> list[nn.Module]:
    return [
        block
        for name in ("transformer_blocks", "single_transformer_blocks", "blocks")
        for block in getattr(module, name, [])
    ]


def data(tokens: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(ITEMS, *shape, generator=generator)

    return {
        "x": draw(tokens, WIDTH),
        "text": draw(4, 6),
        "pooled": draw(5),
        "target": draw(tokens, WIDTH),
        "time": torch.rand(ITEMS, generator=generator),
    }


def flux_velocity(module: nn.Module, items: dict[str, Tensor]) -> Tensor:
    tokens = items["x"].shape[1]
    ids = torch.stack([torch.zeros(tokens), torch.arange(tokens) // 2, torch.arange(tokens) % 2], dim=1)
    return module(
        hidden_states=items["x"],
        encoder_hidden_states=items["text"],
        pooled_projections=items["pooled"],
        timestep=items["time"],
        img_ids=ids,
        txt_ids=torch.zeros(items["text"].shape[1], 3),
        return_dict=False,
    )[0]


def qwen_velocity(module: nn.Module, items: dict[str, Tensor]) -> Tensor:
    batch, tokens = items["x"].shape[:2]
    return module(
        hidden_states=items["x"],
        encoder_hidden_states=items["text"],
        timestep=items["time"],
        encoder_hidden_states_mask=torch.ones(items["text"].shape[:2], dtype=torch.bool),
        img_shapes=[[(1, tokens // 2, 2)]] * batch,
        return_dict=False,
    )[0]


def wan_velocity(module: nn.Module, items: dict[str, Tensor]) -> Tensor:
    video = items["x"].unflatten(1, (2, -1, 1)).permute(0, 4, 1, 2, 3)  # two frames
    time = items["time"]
    found = module(hidden_states=video, encoder_hidden_states=items["text"], timestep=time, return_dict=False)[0]
    return found.permute(0, 2, 3, 4, 1).flatten(1, 3)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, dict[str, Tensor]], Tensor]]] = {
    "flux": (flux, flux_velocity),
    "qwen": (qwen, qwen_velocity),
}

WITH_VIDEO = {**MODELS, "wan": (wan, wan_velocity)}

# Further settings of the engine to combine with split tokens.
LIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "everything": {"comm": "reshard", "checkpointing": "block", "grad_sync": "every"},
}


def loss_of(velocity: Callable[[nn.Module, dict[str, Tensor]], Tensor], module: nn.Module) -> Any:
    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        error = ((velocity(module, items) - items["target"]) ** 2).mean((1, 2))
        return error, Info(error.detach())

    return loss


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Return the clipped gradients of an engine's first update: ten times AdamW's first moments."""
    moments = {name: tensor for name, tensor in engine.state().items() if name.startswith("exp_avg.")}
    return {name: 10 * gather(tensor) for name, tensor in moments.items()}
