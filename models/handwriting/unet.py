"""The handwriting UNet: a small convolutional epsilon-prediction model for 1x8x32 images of 4-digit codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fluvial.models.handwriting.data import DIGITS, SIZE
from fluvial.models.handwriting.model import CodeCond, Codes
from fluvial.models.pixel_model import PixelModel
from fluvial.models.protocol import Prediction, Schedule

BASE_UNET = Path(__file__).parent / "base_unet"  # the shipped weights, from `fluvial pretrain handwriting-unet`

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
class HandwritingUNet(Codes, PixelModel):
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

    def scheduler(self, steps: int) -> Any:
        """Return diffusers' DDIMScheduler with Stable Diffusion's noise levels, set to `steps` steps."""
        from diffusers import DDIMScheduler

        scheduler = DDIMScheduler(**SCHEDULER)
        scheduler.set_timesteps(steps)
        return scheduler

    def schedule(self, steps: int, shape: tuple[int, ...] = ()) -> Schedule:
        """Return alpha_bar of each timestep of the scheduler, and of timestep 0.

        The last level is final_alpha_cumprod of DDIMScheduler with set_alpha_to_one=False: samples keep noise of variance
        0.0009. If `steps` divides 1000, each step is the scheduler's own. Otherwise DDIMScheduler steps to a level other
        than that of its next timestep; here a sample is always at the level of its timestep.

        Raises:
            ValueError: steps is below 1, or so large that timestep 0 occurs twice.
        """
        if not 1 <= steps <= 666:
            raise ValueError(f"steps is {steps}, expected 1 to 666")
        scheduler = self.scheduler(steps)
        levels = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod[None]])
        return Schedule(levels, scheduler.timesteps.to(torch.float32))

    def predict(
        self, module: nn.Module, x: Tensor, level: Tensor, cond: CodeCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return epsilon `[B, 1, 8, 32]` for samples at cumulative signal powers level `[B]`."""
        return module(
            x,
            find_timestep(level) if timestep is None else timestep,
            encoder_hidden_states=cond.tokens,
            return_dict=False,
        )[0]


def find_timestep(alpha_bar: Tensor) -> Tensor:
    """Return the timestep whose cumulative signal power is nearest to alpha_bar `[B]`: whole numbers in float32, `[B]`."""
    levels = alphas_cumprod(alpha_bar.device).to(alpha_bar.dtype)
    return (alpha_bar[:, None] - levels).abs().argmin(1).to(torch.float32)


@cache
def alphas_cumprod(device: torch.device) -> Tensor:
    """Return the cumulative signal power of each timestep, `[1000]` float32, falling."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(**SCHEDULER).alphas_cumprod.to(device)
