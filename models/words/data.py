"""Data of the words model: 1,608 English words of 3 to 6 letters, drawn with open fonts in several sizes and places."""

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fluvial.core.random import Key, fold_in, uniform

SHORTEST, LONGEST = 3, 6  # letters per word
HEIGHT, WIDTH = 24, 96  # pixels
LETTERS = " abcdefghijklmnopqrstuvwxyz"  # index 0 is no letter
LIST = Path(__file__).parent / "words.txt"
# DejaVu fonts, which come with matplotlib; Bitstream Vera licence, changes in the public domain.
FONTS = ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf")
SIZES = (20, 21)  # in pixels per em
ADVANCE = 16  # pixels from one letter to the next
PLACES = 2 * LONGEST - 1  # where the middle of a letter can be, half an advance apart
BASELINE = 18  # pixels from the top
SHIFT = 1  # largest offset from the centre, in pixels


@cache
def words(split: Literal["train", "heldout"]) -> tuple[str, ...]:
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


def as_letters(prompts: Sequence[str]) -> Tensor:
    """Return the letters of a batch of words, int64 `[B, 6]`: 1 for a to 26 for z, and 0 after the last letter."""
    for prompt in prompts:
        check_word(prompt)
    return torch.tensor([[LETTERS.index(letter) for letter in prompt.ljust(LONGEST)] for prompt in prompts]).reshape(
        -1, LONGEST
    )


def places(prompts: Sequence[str]) -> Tensor:
    """Return where the letters of a batch of words are drawn, int64 `[B, 6]`, from 0 to 10; -1 after the last letter."""
    first = [LONGEST - len(prompt) for prompt in prompts]
    rows = [
        [start + 2 * letter if letter < len(prompt) else -1 for letter in range(LONGEST)]
        for start, prompt in zip(first, prompts, strict=True)
    ]
    return torch.tensor(rows).reshape(-1, LONGEST)


def write(key: Key, prompts: Sequence[str]) -> Tensor:
    """Return one image per prompt, `[B, 1, 24, 96]` in [-1, 1]: black on white, in a random font, size and place."""
    draws = uniform(fold_in(key, torch.arange(len(prompts))), (len(prompts), 4)).tolist()
    images = [draw(prompt, *numbers) for prompt, numbers in zip(prompts, draws, strict=True)]
    pixels = np.stack(images) if images else np.zeros((0, HEIGHT, WIDTH), np.uint8)
    return torch.from_numpy(pixels).to(torch.float32)[:, None] / 127.5 - 1


def draw(word: str, font: float, size: float, across: float, down: float) -> np.ndarray:
    """Return a word as uint8 pixels `[24, 96]`, in the middle but for an offset, with letters at equal distances.

    Args:
        word: word to draw.
        font, size, across, down: numbers in [0, 1) that choose the font, its size and the offset.
    """
    check_word(word)
    face = typeface(FONTS[int(font * len(FONTS))], SIZES[int(size * len(SIZES))])
    left = (WIDTH - ADVANCE * (len(word) - 1)) / 2 + (2 * across - 1) * SHIFT
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    for place, letter in enumerate(word):
        middle = left + ADVANCE * place, BASELINE + (2 * down - 1) * SHIFT
        ImageDraw.Draw(image).text(middle, letter, fill=0, font=face, anchor="ms")
    return np.asarray(image)


@cache
def typeface(name: str, pixels: int) -> ImageFont.FreeTypeFont:
    """Return one of the fonts that come with matplotlib."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    return ImageFont.truetype(path, pixels, layout_engine=ImageFont.Layout.BASIC)
