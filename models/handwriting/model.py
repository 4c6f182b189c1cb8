"""Handwriting models: an SD3 transformer and a UNet that generate 4-digit codes as 1x8x32 images, in pixel space."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.handwriting.data import DIGITS, SIZE, check_code, to_digits
from fluvial.models.pixel_model import PixelModel, PixelTransformer
from fluvial.models.protocol import Prediction, Schedule

BASE = Path(__file__).parent / "base"  # the shipped weights, from `fluvial.bench pretrain-handwriting`

# Settings of diffusers' SD3Transformer2DModel: 0.6 million parameters.
CONFIG = {
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "caption_projection_dim": 64,
    "joint_attention_dim": 10 + DIGITS,
    "pooled_projection_dim": 10 * DIGITS,
    "pos_embed_max_size": 16,
}
# Scale of one-hot inputs, so that a linear layer's embeddings start at about unit size.
ONE_HOT = 1.5


class CodeCond(NamedTuple):
    """Conditioning of the built-in models, with the sizes of handwriting."""

    tokens: Tensor  # [B, 4, 14] each character and its position, one-hot
    pooled: Tensor  # [B, 40] all characters, one-hot


class CodePrompts:
    """Prompts and image size of the handwriting models."""

    event = (1, SIZE, DIGITS * SIZE)
    check_prompt = staticmethod(check_code)

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return the codes one-hot, with zeros for the empty prompt; the first linear layers of the network embed them.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        is_conditional = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        digits = nn.functional.one_hot(to_digits([prompt or "0" * DIGITS for prompt in prompts]), 10) * is_conditional
        digits = digits.to(torch.float32)
        position = torch.eye(DIGITS).expand(len(prompts), DIGITS, DIGITS)
        return CodeCond(ONE_HOT * torch.cat([digits, position], dim=-1), ONE_HOT * digits.flatten(1))


@dataclass(eq=False)
class Handwriting(CodePrompts, PixelTransformer):
    """The model protocol over the handwriting transformer, which predicts a velocity; see `PixelModel`."""

    name, settings = "handwriting", CONFIG
    weights: Path | None = BASE


BASE_UNET = Path(__file__).parent / "base_unet"  # the shipped weights, from `fluvial.bench pretrain-handwriting-unet`

# Settings of diffusers' UNet2DConditionModel: 0.7 million parameters. There, attention_head_dim is the number of heads.
CONFIG_UNET = {
    "sample_size": [SIZE, DIGITS * SIZE],
    "in_channels": 1,
    "out_channels": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [16, 32, 48],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 10 + DIGITS,
    "attention_head_dim": 2,
    "use_linear_projection": True,
}
# Stable Diffusion's noise levels. Its "leading" spacing would start a schedule of few steps below pure noise.
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "timestep_spacing": "trailing",
}


@dataclass(eq=False)
class HandwritingUNet(CodePrompts, PixelModel):
    """The model protocol over the handwriting UNet, which predicts epsilon and attends to the tokens of a prompt only."""

    name, network, settings = "handwriting-unet", "UNet2DConditionModel", CONFIG_UNET
    weights: Path | None = BASE_UNET
    prediction: ClassVar[Prediction] = "epsilon"
    prompt_layers = ("*.attn2.to_k", "*.attn2.to_v")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "proj_in", "proj_out", "time_emb_proj")

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the down blocks, the middle block and the up blocks."""
        down, up = (module.get_submodule(name).children() for name in ("down_blocks", "up_blocks"))
        return [*down, module.get_submodule("mid_block"), *up]

    def build_scheduler(self, steps: int) -> Any:
        """Return diffusers' DDIMScheduler with Stable Diffusion's noise levels, set to `steps` steps."""
        from diffusers import DDIMScheduler

        scheduler = DDIMScheduler(**SCHEDULER)
        scheduler.set_timesteps(steps)
        return scheduler

    def schedule(self, steps: int, shape: tuple[int, ...] = ()) -> Schedule:
        """Return alpha_bar of each timestep of the scheduler, and of timestep 0.

        The last level is final_alpha_cumprod of DDIMScheduler with set_alpha_to_one=False: samples keep noise of variance
        0.0009. If `steps` divides 1000, each step equals the scheduler's. Otherwise DDIMScheduler steps to a level other
        than that of its next timestep; here a sample is always at the level of its timestep.

        Raises:
            ValueError: steps is below 1, or so large that timestep 0 occurs twice.
        """
        if not 1 <= steps <= 666:
            raise ValueError(f"steps is {steps}, expected 1 to 666")
        scheduler = self.build_scheduler(steps)
        levels = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
        return Schedule(levels, scheduler.timesteps.to(torch.float32))

    def predict(
        self, module: nn.Module, x: Tensor, level: Tensor, cond: CodeCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return epsilon `[B, 1, 8, 32]` for samples at cumulative signal powers level `[B]`."""
        return module(
            x, find_timestep(level) if timestep is None else timestep, encoder_hidden_states=cond.tokens, return_dict=False
        )[0]


def find_timestep(alpha_bar: Tensor) -> Tensor:
    """Return the timestep whose cumulative signal power is nearest to alpha_bar `[B]`: integers in float32, `[B]`."""
    levels = compute_alphas_cumprod(alpha_bar.device).to(alpha_bar.dtype)
    return (alpha_bar[:, None] - levels).abs().argmin(1).to(torch.float32)


@cache
def compute_alphas_cumprod(device: torch.device) -> Tensor:
    """Return the cumulative signal power of each timestep, `[1000]` float32, falling."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(**SCHEDULER).alphas_cumprod.to(device)
