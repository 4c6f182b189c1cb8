"""Words of 3 to 6 letters as 1x24x96 images, and a small SD3 transformer that draws them, in pixel space."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, uniform
from fluvial.models.handwriting.model import ONE_HOT, CodeCond
from fluvial.models.lora import JOINT_ATTENTION
from fluvial.models.pixel_model import PixelTransformer

SHORTEST, LONGEST = 3, 6  # letters per word
HEIGHT, WIDTH = 24, 96  # pixels
LETTERS = " abcdefghijklmnopqrstuvwxyz"  # index 0 is no letter
LIST = Path(__file__).parent / "words.txt"
# From matplotlib; Bitstream Vera licence, changes in the public domain.
FONT = "DejaVuSansMono-Bold.ttf"
SIZE = 21  # pixels per em
ADVANCE = 16  # pixels from one letter to the next
POSITIONS = 2 * LONGEST - 1  # positions of a letter's centre, half an advance apart
BASELINE = 18  # pixels from the top
SHIFT = 1  # largest offset from the centre, in pixels


@cache
def list_words(split: Literal["train", "heldout"]) -> tuple[str, ...]:
    """Return the words of a split. One fifth of the list, chosen by hash, is held out and never trained on."""
    held_out = split == "heldout"
    every = [word for word in LIST.read_text(encoding="utf-8").split("\n") if word and not word.startswith("#")]
    return tuple(word for word in every if (zlib.crc32(word.encode()) % 5 == 0) == held_out)


def check_word(prompt: str) -> None:
    """Raise ValueError unless the prompt is a word of 3 to 6 letters from a to z."""
    if not (SHORTEST <= len(prompt) <= LONGEST and prompt.isascii() and prompt.isalpha() and prompt.islower()):
        raise ValueError(
            f"prompt {prompt!r} is not a word of {SHORTEST} to {LONGEST} letters from a to z, expected for example 'river'"
        )


def to_letters(prompts: Sequence[str]) -> Tensor:
    """Return the letters of a batch of words, int64 `[B, 6]`: 1 for a to 26 for z, and 0 after the last letter."""
    for prompt in prompts:
        check_word(prompt)
    return torch.tensor([[LETTERS.index(letter) for letter in prompt.ljust(LONGEST)] for prompt in prompts]).reshape(
        -1, LONGEST
    )


def list_positions(prompts: Sequence[str]) -> Tensor:
    """Return the positions of the letters of a batch of words, int64 `[B, 6]`, from 0 to 10; -1 after the last letter."""
    first = [LONGEST - len(prompt) for prompt in prompts]
    rows = [
        [start + 2 * letter if letter < len(prompt) else -1 for letter in range(LONGEST)]
        for start, prompt in zip(first, prompts, strict=True)
    ]
    return torch.tensor(rows).reshape(-1, LONGEST)


def draw_words(key: Key, prompts: Sequence[str]) -> Tensor:
    """Draw one image per prompt, `[B, 1, 24, 96]` in [-1, 1]: black on white, moved by up to a pixel in each direction."""
    draws = uniform(fold_in(key, torch.arange(len(prompts))), (len(prompts), 2))
    moves = (draws * (2 * SHIFT + 1)).long() - SHIFT
    return stack_images([draw_word(prompt, *move) for prompt, move in zip(prompts, moves.tolist(), strict=True)])


def stack_images(images: Sequence[np.ndarray]) -> Tensor:
    """Return uint8 images `[24, 96]` as one tensor, `[B, 1, 24, 96]` in [-1, 1]."""
    pixels = np.stack(images) if images else np.zeros((0, HEIGHT, WIDTH), np.uint8)
    return torch.from_numpy(pixels).to(torch.float32)[:, None] / 127.5 - 1


def draw_word(word: str, across: int = 0, down: int = 0) -> np.ndarray:
    """Draw a word as uint8 pixels `[24, 96]`, with letters at equal distances, moved from the centre by whole pixels."""
    check_word(word)
    left = (WIDTH - ADVANCE * (len(word) - 1)) // 2 + across
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    for number, letter in enumerate(word):
        anchor = left + ADVANCE * number, BASELINE + down
        ImageDraw.Draw(image).text(anchor, letter, fill=0, font=load_font(), anchor="ms")
    return np.asarray(image)


@cache
def load_font() -> ImageFont.FreeTypeFont:
    """Return the font of the drawn words."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", FONT)
    return ImageFont.truetype(path, SIZE, layout_engine=ImageFont.Layout.BASIC)


BASE = Path(__file__).parent / "base"  # the shipped weights, from `python -P -m fluvial.bench pretrain-words`

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
    "joint_attention_dim": len(LETTERS) + POSITIONS,
    "pooled_projection_dim": len(LETTERS) * LONGEST,
    "pos_embed_max_size": 16,
}
LEAST_SIGMA = 0.1  # smallest divisor


@dataclass(eq=False)
class Words(PixelTransformer):
    """The model protocol over the words transformer, which predicts a velocity; see `PixelModel`."""

    name, settings, event = "words", CONFIG, (1, HEIGHT, WIDTH)
    weights: Path | None = BASE
    check_prompt = staticmethod(check_word)
    # Adapters of the feed-forward layers and of norm_out draw a faint pattern of 8x8 pixels into the background.
    lora_targets = (*JOINT_ATTENTION, "norm1.linear", "norm1_context.linear")

    def encode(self, prompts: Sequence[str]) -> CodeCond:
        """Return letters and positions one-hot, `[B, 6, 38]`, and all letters, `[B, 162]`, with zeros for the empty prompt.

        The shipped weights were not trained with the empty prompt, so guidance does not help them.
        """
        is_conditional = torch.tensor([bool(prompt) for prompt in prompts])[:, None, None]
        words = [prompt or "abc" for prompt in prompts]
        letters = nn.functional.one_hot(to_letters(words), len(LETTERS)) * is_conditional
        positions = nn.functional.one_hot(list_positions(words) + 1, POSITIONS + 1)[..., 1:] * is_conditional
        tokens = torch.cat([letters, positions], dim=-1).to(torch.float32)
        return CodeCond(ONE_HOT * tokens, ONE_HOT * letters.flatten(1).to(torch.float32))

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        """Return v = (x - x_0) / max(sigma, 0.1), `[B, 1, 24, 96]`; the network predicts the clean image x_0.

        A token is a patch of 64 pixels, and the network is 96 wide, which is enough for letters, but not for their noise as
        well. Source: arXiv 2511.13720.
        """
        clean = super().predict(module, x, sigma, cond, timestep=timestep)
        return (x - clean) / sigma.clamp(min=LEAST_SIGMA).reshape(-1, 1, 1, 1)
