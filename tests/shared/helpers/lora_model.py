"""The handwriting model with LoRA adapters that change its output, with inputs and a loss that uses all of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import LoraConfig, add_lora, use_adapter

MODEL = Handwriting()
LORA = LoraConfig(rank=2, alpha=3.0)  # alpha / rank is neither 1 nor a power of two


class Info(NamedTuple):
    error: Tensor


def adapted(*adapters: str, seed: int = 0, empty: bool = False) -> nn.Module:
    """Build the handwriting model with adapters (`default` if none is named), in evaluation mode."""
    module = MODEL.build(empty=empty).eval()
    add_lora(module, LORA, MODEL.lora_targets, adapters=adapters or ("default",), seed=seed)
    return module


def perturb(module: nn.Module, adapter: str = "default", *, seed: int = 0) -> None:
    """Set B of an adapter to random values, so that it changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if f"lora_B.{adapter}." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def inputs(count: int) -> dict[str, Tensor]:
    cond = MODEL.encode([f"{1234 * i:04d}" for i in range(1, count + 1)])
    x = torch.linspace(-2, 2, count * 8 * 32).reshape(count, 1, 8, 32)
    return {"x": x, "sigma": torch.linspace(0.9, 0.4, count), "tokens": cond.tokens, "pooled": cond.pooled}


def velocity(module: nn.Module, items: dict[str, Tensor]) -> Tensor:
    return module(
        hidden_states=items["x"],
        encoder_hidden_states=items["tokens"],
        pooled_projections=items["pooled"],
        timestep=1000 * items["sigma"],
        return_dict=False,
    )[0]


def run(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return velocity(module, inputs(2))


def loss_of(module: nn.Module, others: Sequence[str | None]) -> Any:
    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        trained, target = velocity(module, items), items["x"]
        for weight, other in enumerate(others, start=1):
            with torch.no_grad(), use_adapter(module, other):
                target = target + weight * velocity(module, items)
        error = (trained - target).square().mean((1, 2, 3))
        return error, Info(error.detach())

    return loss
