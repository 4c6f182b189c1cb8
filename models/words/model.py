"""The words model: a small SD3 transformer that draws words of 3 to 6 letters as 1x24x96 images, in pixel space."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.models.handwriting.model import ONE_HOT, CodeCond
from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pixel_model import PixelTransformer
from fluvial.models.words.data import HEIGHT, LETTERS, LONGEST, PLACES, WIDTH, as_letters, check_word, places

BASE = Path(__file__).parent / "base"  # the shipped weights, from `fluvial pretrain words`

# Settings of diffusers' SD3Transformer2DModel.
CONFIG = {
    "sample_size": WIDTH,
    "patch_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "caption_projection_dim": 96,
    "joint_attention_dim": len(LETTERS) + PLACES,
    "pooled_projection_dim": len(LETTERS) * LONGEST,
    "pos_embed_max_size": 16,
}
LEAST_SIGMA = 0.1  # that is divided by


@dataclass(eq=False)
class Words(PixelTransformer):
    """The model protocol over the words transformer, which predicts a velocity; see `PixelModel`."""

    name, settings, event = "words", CONFIG, (1, HEIGHT, WIDTH)
    weights: Path | None = BASE
    check_prompt = staticmethod(check_word)
    # Adapters of the feed-forward layers and of norm_out draw a faint pattern of 8x8 pixels into the background.
    lora_targets = (*JOINT_ATTENTION, "norm1.linear", "norm1_context.linear")

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return letters and places one-hot, `[B, 6, 38]`, and all letters, `[B, 162]`, with zeros for the empty prompt.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        given = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        drawn = [prompt or "abc" for prompt in prompts]
        letters = nn.functional.one_hot(as_letters(drawn), len(LETTERS)) * given
        place = nn.functional.one_hot(places(drawn) + 1, PLACES + 1)[..., 1:] * given
        tokens = torch.cat([letters, place], dim=-1).to(torch.float32)
        return CodeCond(ONE_HOT * tokens, ONE_HOT * letters.flatten(1).to(torch.float32))

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return v = (x - x_0) / max(sigma, 0.1), `[B, 1, 24, 96]`; the network predicts the clean image x_0.

        A token is a patch of 64 pixels, and the network is 96 wide: it has room for letters, not for their noise as well.
        Source: arXiv 2511.13720.
        """
        clean = super().predict(module, x, sigma, cond, timestep=timestep)
        return (x - clean) / sigma.clamp(min=LEAST_SIGMA).reshape(-1, 1, 1, 1)
