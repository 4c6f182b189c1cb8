"""The handwriting model: a small SD3 transformer that generates 4-digit codes as 1x8x32 images, in pixel space."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.handwriting.data import DIGITS, SIZE, as_digits, check_code
from fluvial.models.pixel_model import PixelTransformer

BASE = Path(__file__).parent / "base"  # the shipped weights, from `fluvial pretrain handwriting`

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
    """Conditioning of the built-in models; the sizes are those of handwriting."""

    tokens: Tensor  # [B, 4, 14] each character and its position, one-hot
    pooled: Tensor  # [B, 40] all characters, one-hot


class Codes:
    """Prompts and image size of the handwriting models."""

    event = (1, SIZE, DIGITS * SIZE)
    check_prompt = staticmethod(check_code)

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return the codes one-hot, with zeros for the empty prompt; the first linear layers of the network embed them.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        given = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        digits = nn.functional.one_hot(as_digits([prompt or "0" * DIGITS for prompt in prompts]), 10) * given
        digits = digits.to(torch.float32)
        position = torch.eye(DIGITS).expand(len(prompts), DIGITS, DIGITS)
        return CodeCond(ONE_HOT * torch.cat([digits, position], dim=-1), ONE_HOT * digits.flatten(1))


@dataclass(eq=False)
class Handwriting(Codes, PixelTransformer):
    """The model protocol over the handwriting transformer, which predicts a velocity; see `PixelModel`."""

    name, settings = "handwriting", CONFIG
    weights: Path | None = BASE
