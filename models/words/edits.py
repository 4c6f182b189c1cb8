"""Edit model: the words network with an image of a misspelt word as a second input channel, which it corrects."""

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fluvial.models.images import read_image
from fluvial.models.replay.media import MediaPrompt, TextPrompt, get_text
from fluvial.models.words.model import (
    ADVANCE,
    CONFIG,
    HEIGHT,
    LETTERS,
    SHIFT,
    WIDTH,
    Words,
    draw_word,
    list_positions,
    list_words,
    stack_images,
    to_letters,
)

EDIT_BASE = Path(__file__).parent / "edit_base"  # the shipped weights, from `python -P -m fluvial.bench pretrain-edit-words`
ARGUMENT = "image"  # name of the image in a prompt's media
MOVES = tuple((across, down) for across in range(-SHIFT, SHIFT + 1) for down in range(-SHIFT, SHIFT + 1))
LEAST_APART = 8.0  # of 255: two letters, or one and itself moved by a pixel, differ by at least 9.9 on average


class WordEditCond(NamedTuple):
    """Conditioning of the edit model: that of the words model, and the image."""

    tokens: Tensor  # [B, 6, 38]
    pooled: Tensor  # [B, 162]
    image: Tensor  # [B, 1, 24, 96] in [-1, 1]; zeros for the empty prompt


@dataclass(eq=False)
class EditWords(Words):
    """The model protocol over the words transformer with the image to correct as a second input channel.

    A prompt is a word with an image of 24x96 pixels (`MediaPrompt`). The image is concatenated to the noisy sample, as FLUX
    Control and InstructPix2Pix (arXiv 2211.09800) do. Without `weights` the network starts as that of `Words`, with zeros
    for the new channel.
    """

    name, settings = "edit-words", {**CONFIG, "in_channels": 2}
    weights: Path | None = EDIT_BASE
    takes: ClassVar[tuple[str, ...]] = (ARGUMENT,)

    def build(self, *, empty: bool = False) -> nn.Module:
        """See `PixelModel.build`."""
        module = super().build(empty=empty)
        if self.weights is None:
            start = Words().build().state_dict()
            kernel = start["pos_embed.proj.weight"]
            start["pos_embed.proj.weight"] = torch.cat([kernel, torch.zeros_like(kernel)], dim=1)
            module.load_state_dict(start)
        return module

    def encode(self, prompts: Sequence[TextPrompt]) -> Any:
        """Return the word's conditioning and its image as a `WordEditCond`; the image is zeros for the empty prompt.

        Raises:
            ValueError: a word has no image, or an image of another size; the message names the word.
        """
        images = torch.stack([read_pixels(prompt) for prompt in prompts])
        return WordEditCond(*super().encode([get_text(prompt) for prompt in prompts]), images)

    def build_network_input(self, x: Tensor, cond: WordEditCond) -> Tensor:
        """Return the samples with their images as a second channel, `[B, 2, 24, 96]`."""
        return torch.cat([x, cond.image.to(x.dtype)], dim=1)


def read_pixels(prompt: TextPrompt) -> Tensor:
    """Return the image of a prompt, `[1, 24, 96]` in [-1, 1]; zeros for the empty prompt. See `EditWords.encode`."""
    if not prompt:
        return torch.zeros(1, HEIGHT, WIDTH)
    source = None if isinstance(prompt, str) else prompt.media.get(ARGUMENT)
    if not isinstance(source, Path | bytes):
        raise ValueError(f"prompt {get_text(prompt)!r} has no image to correct: give its record a column {ARGUMENT}")
    image = read_image(source)
    if image.size != (WIDTH, HEIGHT):
        raise ValueError(
            f"the image of prompt {get_text(prompt)!r} has {image.width}x{image.height} pixels, expected {WIDTH}x{HEIGHT}"
        )
    return torch.from_numpy(np.array(image.convert("L"))).to(torch.float32)[None] / 127.5 - 1


@cache
def draw_misspelt_words(split: Literal["train", "heldout"]) -> Mapping[str, bytes]:
    """Draw each word of a split with one wrong letter, as a PNG file; letter and offset are seeded by the word."""
    images = {}
    for word in list_words(split):
        choice = random.Random(word)
        index = choice.randrange(len(word))
        wrong = choice.choice(LETTERS[1:].replace(word[index], ""))
        file = io.BytesIO()
        Image.fromarray(draw_word(word[:index] + wrong + word[index + 1 :], *choice.choice(MOVES))).save(file, "PNG")
        images[word] = file.getvalue()
    return images


def draw_corrections(prompts: Sequence[MediaPrompt]) -> Tensor:
    """Draw each prompt's word at the offset of its image, `[B, 1, 24, 96]` in [-1, 1]."""
    return stack_images([draw_word(prompt.text, *locate_word(prompt.text, read_pixels(prompt)).move) for prompt in prompts])


def unchanged(images: Tensor, prompts: Sequence[str], condition_images: Sequence[Tensor]) -> Tensor:
    """Return 1 - sum |x - c| / sum (1 - c) over the pixels outside of the wrong letter, at least 0, float32 `[B]`.

    The sum of 1 - c is the ink of the other letters, so a changed letter costs its share, as in the reward of letters.

    Args:
        images: images x, `[B, 1, 24, 96]` in [0, 1].
        prompts: word of each image.
        condition_images: image c before each edit, `[C, 24, 96]` in [0, 1].
    """
    scores = []
    for image, word, before_images in zip(images.detach().float().cpu(), prompts, condition_images, strict=True):
        before = before_images.float().cpu().mean(0, keepdim=True)
        columns = locate_word(word, 2 * before - 1).columns
        change, ink = (image - before).abs(), 1 - before
        change[..., columns] = ink[..., columns] = 0
        scores.append(max(0.0, 1 - float(change.sum() / ink.sum().clamp(min=1e-6))))
    return torch.tensor(scores, dtype=torch.float32, device=images.device)


class WordLocation(NamedTuple):
    """Location of a word with one wrong letter in an image."""

    move: tuple[int, int]  # offset of the word from the centre, in pixels
    columns: slice  # pixel columns of the wrong letter


def locate_word(word: str, image: Tensor) -> WordLocation:
    """Locate a word with one wrong letter in an image `[1, 24, 96]` in [-1, 1]: the move that fits most letters."""
    starts = [ADVANCE // 2 * position for position in list_positions([word])[0].tolist() if position >= 0]
    pixels = 127.5 * (image[0] + 1)
    letters = torch.stack([pixels[:, start : start + ADVANCE] for start in starts])
    expected = draw_glyphs()[:, to_letters([word])[0, : len(word)] - 1]  # [moves, letters, rows, columns]
    difference = (expected - letters).abs().mean((-2, -1))
    best = int(difference.clamp(max=LEAST_APART).sum(1).argmin())
    start = starts[int(difference[best].argmax())]
    return WordLocation(MOVES[best], slice(start, start + ADVANCE))


@cache
def draw_glyphs() -> Tensor:
    """Draw each letter by each move, `[9, 26, 24, 16]` float32 from 0 to 255; a word consists of these side by side."""
    middle = (WIDTH - ADVANCE) // 2
    glyphs = [[draw_word(3 * letter, *move)[:, middle : middle + ADVANCE] for letter in LETTERS[1:]] for move in MOVES]
    return torch.from_numpy(np.array(glyphs)).to(torch.float32)
