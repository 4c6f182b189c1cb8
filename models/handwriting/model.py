"""The handwriting model: a small SD3 transformer that generates 4-digit codes as 1x8x32 images, in pixel space."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.core.guidance import classifier_free
from fluvial.core.sigmas import from_scheduler
from fluvial.models.handwriting.data import DIGITS, SIZE, as_digits, check_code
from fluvial.models.handwriting.weights import build
from fluvial.models.protocol import Prediction, Schedule

BASE = Path(__file__).parent / "base"  # the shipped weights, from `fluvial pretrain handwriting`
SHIFT = 3.0

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
    """Conditioning of the handwriting models."""

    tokens: Tensor  # [B, 4, 14] digit and position of each character, one-hot
    pooled: Tensor  # [B, 40] all digits, one-hot


class Handwriting:
    """The model protocol over the handwriting transformer, which predicts a velocity.

    Args:
        weights: folder of the transformer as diffusers saves it; None for random weights.
        seed: seed of random weights.
    """

    prediction: Prediction = "velocity"
    guide = staticmethod(classifier_free)
    prompt_layers = ("context_embedder", "time_text_embed.text_embedder")
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
        "net.0.proj",
        "net.2",
        "linear",
    )

    def __init__(self, weights: Path | None = BASE, *, seed: int = 0) -> None:
        self.weights, self.seed = weights, seed

    def build(self, *, empty: bool = False) -> nn.Module:
        """Return the transformer with its weights, in float32, or `empty`, with parameters on the meta device.

        Raises:
            ValueError: the folder of weights lacks a file or holds another model, or `empty` is set for random weights.
        """
        from diffusers import SD3Transformer2DModel

        return build(SD3Transformer2DModel, CONFIG, self.weights, name="handwriting", seed=self.seed, empty=empty)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the joint transformer blocks."""
        blocks = module.transformer_blocks
        assert isinstance(blocks, nn.ModuleList)
        return list(blocks)

    def latent_shape(self, height: int = SIZE, width: int = DIGITS * SIZE, frames: int = 1) -> tuple[int, ...]:
        """Return (1, 8, 32), the shape of the only supported size."""
        if (height, width, frames) != (SIZE, DIGITS * SIZE, 1):
            raise ValueError(
                f"the size is {height}x{width} of {frames} frames, expected {SIZE}x{DIGITS * SIZE} of 1: codes have one size"
            )
        return (1, SIZE, DIGITS * SIZE)

    def scheduler(self, steps: int) -> Any:
        """Return diffusers' flow-matching scheduler with shift 3, set to `steps` steps."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        return scheduler

    def schedule(self, steps: int, shape: tuple[int, ...] = ()) -> Schedule:
        """Return the schedule of the scheduler."""
        scheduler = self.scheduler(steps)
        return Schedule(from_scheduler(scheduler), scheduler.timesteps)

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError unless the prompt is a code of four digits."""
        check_code(prompt)

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return the codes one-hot, with zeros for the empty prompt; the first linear layers of the network embed them.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        given = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        digits = nn.functional.one_hot(as_digits([prompt or "0" * DIGITS for prompt in prompts]), 10) * given
        digits = digits.to(torch.float32)
        position = torch.eye(DIGITS).expand(len(prompts), DIGITS, DIGITS)
        return CodeCond(ONE_HOT * torch.cat([digits, position], dim=-1), ONE_HOT * digits.flatten(1))

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: CodeCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v `[B, 1, 8, 32]`."""
        return module(
            hidden_states=x,
            encoder_hidden_states=cond.tokens,
            pooled_projections=cond.pooled,
            timestep=sigma * 1000 if timestep is None else timestep,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        """Return images in [0, 1]; the samples are pixels in [-1, 1]."""
        return ((latents.float() + 1) / 2).clamp(0, 1)
