"""A job over a small FLUX transformer, whose tokens can be split over ranks; its latents are shown as images."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from helpers import tiny_transformers
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.engines.run.job import Job
from fluvial.models import Prediction, Schedule
from fluvial.models.handwriting import Handwriting

TOKENS = 8


class ToyCond(NamedTuple):
    text: Tensor  # [B, 4, 6]
    pooled: Tensor  # [B, 5]


class Toy:
    prediction: Prediction = "velocity"
    lora_targets = ("to_q", "to_k", "to_v", "proj_mlp")
    weights: Path | None = None

    def build(self, *, empty: bool = False) -> nn.Module:
        return tiny_transformers.flux()

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return tiny_transformers.blocks(module)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return (height, width)

    def schedule(self, steps: int, shape: tuple[int, ...]) -> Schedule:
        return Handwriting(None).schedule(steps)

    def check_prompt(self, prompt: str) -> None:
        """Accept any prompt."""

    def encode(self, prompts: Sequence[str]) -> ToyCond:
        drawn = [torch.randn(29, generator=torch.Generator().manual_seed(len(prompt))) for prompt in prompts]
        rows = torch.stack(drawn)
        return ToyCond(rows[:, :24].unflatten(1, (4, 6)), rows[:, 24:])

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: ToyCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        return tiny_transformers.flux_velocity(module, {"x": x, "text": cond.text, "pooled": cond.pooled, "time": sigma})

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().sigmoid()[:, None].expand(-1, 3, -1, -1)

    def guide(self, v: Tensor, v_uncond: Tensor, scale: Tensor) -> Tensor:
        return classifier_free(v, v_uncond, scale)


def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.mean((1, 2, 3)).cpu()


def job() -> Job:
    prompts = ("a", "bb", "ccc")
    return Job(
        Toy(),
        prompts,
        brightness,
        heldout=prompts,
        evaluators={"heldout": brightness},
        shape=(TOKENS, tiny_transformers.WIDTH),
    )
