"""The words model: a small SD3 transformer that draws words of 3 to 6 letters as 1x24x96 images, in pixel space."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.handwriting.model import ONE_HOT
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


class WordCond(NamedTuple):
    """Conditioning of the words model."""

    tokens: Tensor  # [B, 6, 38] each letter and where it is drawn, one-hot
    pooled: Tensor  # [B, 162] all letters, one-hot


class Words(PixelTransformer):
    """The model protocol over the words transformer, which predicts a velocity.

    Args:
        weights: folder of the transformer as diffusers saves it; None for random weights.
        seed: seed of random weights.
    """

    name, settings = "words", CONFIG

    def __init__(self, weights: Path | None = BASE, *, seed: int = 0) -> None:
        super().__init__(weights, seed=seed)

    def latent_shape(self, height: int = HEIGHT, width: int = WIDTH, frames: int = 1) -> tuple[int, ...]:
        """Return (1, 24, 96), the shape of the only supported size."""
        if (height, width, frames) != (HEIGHT, WIDTH, 1):
            raise ValueError(
                f"the size is {height}x{width} of {frames} frames, expected {HEIGHT}x{WIDTH} of 1: words have one size"
            )
        return (1, HEIGHT, WIDTH)

    def check_prompt(self, prompt: str) -> None:
        """Raise ValueError unless the prompt is a word of 3 to 6 letters from a to z."""
        check_word(prompt)

    def encode(self, prompts: Sequence[str]) -> WordCond:
        """Return the words one-hot, with zeros for the empty prompt; the first linear layers of the network embed them.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        given = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        drawn = [prompt or "abc" for prompt in prompts]
        letters = nn.functional.one_hot(as_letters(drawn), len(LETTERS)) * given
        place = nn.functional.one_hot(places(drawn) + 1, PLACES + 1)[..., 1:] * given
        tokens = torch.cat([letters, place], dim=-1).to(torch.float32)
        return WordCond(ONE_HOT * tokens, ONE_HOT * letters.flatten(1).to(torch.float32))

    def predict(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: WordCond, *, timestep: Tensor | None = None
    ) -> Tensor:
        """Return v = (x - x_0) / max(sigma, 0.1), `[B, 1, 24, 96]`; the network predicts the clean image x_0.

        A token is a patch of 64 pixels, and the network is 96 wide: it has room for letters, not for their noise as well.
        Source: arXiv 2511.13720.
        """
        clean = super().predict(module, x, sigma, cond, timestep=timestep)
        return (x - clean) / sigma.clamp(min=LEAST_SIGMA).reshape(-1, 1, 1, 1)
