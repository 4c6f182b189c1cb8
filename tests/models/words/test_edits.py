"""The edit model: its images with one wrong letter, the reward of what stays, its base weights, and its conditioning."""

import io
import random

import pytest
import torch
from helpers.refusals import refuses
from PIL import Image
from torch import Tensor

from fluvial.core.random import fold_in, key, normal
from fluvial.models.replay.media import MediaPrompt
from fluvial.models.words import EditWords, Words, draw_corrections, draw_misspelt_words, list_words, unchanged
from fluvial.models.words.edits import MOVES, locate_word, read_pixels
from fluvial.models.words.model import ADVANCE, HEIGHT, LETTERS, SHIFT, WIDTH, draw_word, list_positions


def file_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def prompt_of(word: str, shown: str, move: tuple[int, int] = (0, 0)) -> MediaPrompt:
    return MediaPrompt(word, {"image": file_of(Image.fromarray(draw_word(shown, *move)))})


def images_of(*drawn: tuple[str, tuple[int, int]]) -> Tensor:
    return torch.stack([torch.tensor(draw_word(word, *move))[None] / 255 for word, move in drawn])


@pytest.mark.long
def test_every_image_has_one_wrong_letter() -> None:
    seen = set()
    for word, file in list(draw_misspelt_words("heldout").items())[::3]:
        shown = read_pixels(MediaPrompt(word, {"image": file}))
        move, columns = locate_word(word, shown)
        same = torch.tensor(draw_word(word, *move)).float() / 127.5 - 1 == shown[0]
        assert not same[:, columns].all()
        same[:, columns] = True
        assert same.all()
        seen.add(move)
    assert set(draw_misspelt_words("train")) == set(list_words("train"))
    assert set(draw_misspelt_words("heldout")) == set(list_words("heldout"))
    assert seen == set(MOVES)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_wrong_letter_and_the_move_are_found(noise: float) -> None:
    choice = random.Random(0)
    for number, word in enumerate(list_words("heldout")[::9]):
        place, move = choice.randrange(len(word)), choice.choice(MOVES)
        shown = word[:place] + choice.choice(LETTERS[1:].replace(word[place], "")) + word[place + 1 :]
        image = images_of((shown, move))[0]
        image = image + noise * normal(fold_in(key(0), torch.tensor([number])), (1, *image.shape))[0]
        start = ADVANCE // 2 * int(list_positions([word])[0, place])
        assert locate_word(word, 2 * image - 1) == (move, slice(start, start + ADVANCE))


def test_the_corrected_word_is_where_the_image_has_it() -> None:
    found = draw_corrections([prompt_of("river", "rover", (1, -1)), prompt_of("act", "ant", (0, 1))])
    torch.testing.assert_close((found + 1) / 2, images_of(("river", (1, -1)), ("act", (0, 1))))
    assert draw_corrections([]).shape == (0, 1, HEIGHT, WIDTH)


def test_unchanged_is_one_minus_the_share_of_ink_that_moved() -> None:
    """Whatever the wrong letter becomes; another letter costs about its share, a moved word more, and white all of it."""
    before = images_of(("rover", (1, 0)))[0].expand(3, -1, -1)
    after = images_of(("river", (1, 0)), ("rover", (1, 0)), ("razer", (1, 0)), ("river", (0, 0)), ("rivex", (1, 0)))
    white, black = torch.ones(1, 1, HEIGHT, WIDTH), torch.zeros(1, 1, HEIGHT, WIDTH)
    scores = unchanged(torch.cat([after, white, black]), ["river"] * 7, [before] * 7)
    assert scores[:2].tolist() == [1.0, 1.0]
    assert scores[5:].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert 0.5 < scores[2] < 0.9
    assert scores[3] < scores[4] < 0.9
    ink = 1 - before[:1]
    apart = (after[4] - before[:1]).abs().sum()  # only the last letter differs, beside the one that is corrected
    apart = apart - (after[0] - before[:1]).abs().sum()
    columns = locate_word("river", 2 * before[:1] - 1).columns
    assert float(scores[4]) == pytest.approx(1 - float(apart / (ink.sum() - ink[..., columns].sum())), abs=1e-5)


def test_the_conditioning_holds_the_image() -> None:
    """The word's own, and the pixels; zeros for the empty prompt. An image in colour, of RGB, counts by its grey."""
    model, shown = EditWords(), Image.fromarray(draw_word("rover"))
    cond = model.encode([prompt_of("river", "rover"), MediaPrompt("river", {"image": file_of(shown.convert("RGB"))}), ""])
    plain = Words().encode(["river", "river", ""])
    assert torch.equal(cond.tokens, plain.tokens)
    assert torch.equal(cond.pooled, plain.pooled)
    torch.testing.assert_close(cond.image[:1], 2 * images_of(("rover", (0, 0))) - 1)
    assert torch.equal(cond.image[0], cond.image[1])
    assert torch.equal(model.build_network_input(torch.zeros_like(cond.image), cond)[:, 1:], cond.image)
    assert not cond.image[2].any()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("river", "prompt 'river' has no image to correct: give its record a column image"),
        (MediaPrompt("river", {"mask_image": b""}), "prompt 'river' has no image to correct"),
        (MediaPrompt("river", {"image": file_of(Image.new("L", (24, 24)))}), "the image of prompt 'river' has 24x24 pixels"),
        (MediaPrompt("river", {"image": b"no image"}), "an image of 8 bytes cannot be read as an image"),
    ],
)
def test_a_prompt_without_an_image_of_its_size_is_refused(prompt: str | MediaPrompt, says: str) -> None:
    refuses(says, EditWords().encode, [prompt])


@pytest.mark.long
@torch.no_grad()
def test_it_starts_as_the_words_network_and_learns_to_see_the_image() -> None:
    prompts = [prompt_of("river", "rover", (0, 1)), prompt_of("river", "rover", (0, -1))]
    x = normal(fold_in(key(0), torch.arange(1)), (1, 1, HEIGHT, WIDTH)).expand(2, -1, -1, -1)
    sigma = torch.ones(2)
    start, base, plain = EditWords(None), EditWords(), Words()
    as_words = plain.predict(plain.build(), x, sigma, plain.encode(["river"] * 2))
    torch.testing.assert_close(start.predict(start.build(), x, sigma, start.encode(prompts)), as_words, rtol=1e-5, atol=1e-5)
    ink = 1 - base.decode(x - base.predict(base.build(), x, sigma, base.encode(prompts)))
    middle = (ink[:, 0].sum(-1) * torch.arange(HEIGHT)).sum(-1) / ink.sum((1, 2, 3))
    assert middle[0] - middle[1] > SHIFT / 2
