"""The built-in model of words: its data, its two recognisers, its base weights, and the model protocol."""

from importlib import import_module
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from helpers.marks import Patch
from helpers.refusals import refuses
from PIL import Image

from fluvial.core.random import fold_in, key, normal
from fluvial.models.words import (
    WordRecogniser,
    Words,
    draw_words,
    legibility,
    list_words,
    load_heldout_recogniser,
    load_reward_recogniser,
    recognisers,
)
from fluvial.models.words.model import (
    ADVANCE,
    BASELINE,
    CONFIG,
    HEIGHT,
    LEAST_SIGMA,
    LETTERS,
    LIST,
    SHIFT,
    WIDTH,
    draw_word,
    load_font,
)


def test_a_fifth_of_the_words_is_held_out() -> None:
    train, heldout = list_words("train"), list_words("heldout")
    listed = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    assert sorted(train + heldout) == sorted(set(listed))
    assert not set(train) & set(heldout)
    assert 0.19 < len(heldout) / len(listed) < 0.23
    for split in (train, heldout):
        assert {len(word) for word in split} == {3, 4, 5, 6}
        assert set("".join(split)) >= set("abcdefghijklmnopqrstuvwxyz") - set("q")


def test_words_are_drawn_by_the_key_within_the_image_and_moved_by_whole_pixels() -> None:
    prompts = ["river", "river", "act"]
    images = draw_words(key(3), prompts)
    assert images.shape == (3, 1, HEIGHT, WIDTH)
    assert torch.equal(images, draw_words(key(3), prompts))
    assert torch.equal(images[:1], draw_words(key(3), ["river"]))
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images, draw_words(key(4), prompts))
    assert draw_words(key(3), []).shape == (0, 1, HEIGHT, WIDTH)
    for letter in LETTERS[1:]:
        left, top, right, bottom = load_font().getbbox(letter, anchor="ms")
        assert max(-left, right) + SHIFT <= ADVANCE / 2
        assert BASELINE - SHIFT + top >= 0
        assert BASELINE + SHIFT + bottom <= HEIGHT
    assert draw_word("wwwwww").min() < 64  # dark on white
    assert np.median(draw_word("wwwwww")) == 255
    images = draw_words(key(7), ["river"] * 90)
    moved = {(i, j): torch.tensor(draw_word("river", i, j)) / 127.5 - 1 for i in (-1, 0, 1) for j in (-1, 0, 1)}
    counts = [sum(torch.equal(image[0], one) for image in images) for one in moved.values()]
    assert sum(counts) == 90
    assert min(counts) >= 2
    for (i, j), one in moved.items():
        assert torch.equal(one.roll((-j, -i), (0, 1)), moved[0, 0])


@pytest.mark.parametrize("prompt", ["ab", "abcdefg", "River", "ri ver", "ri-er", "naïve", "r1ver", ""])
def test_a_prompt_that_is_not_a_word_is_refused(prompt: str) -> None:
    refuses(r"is not a word of 3 to 6 letters from a to z, expected for example 'river'$", Words().check_prompt, prompt)


def test_both_recognisers_read_drawn_words() -> None:
    prompts = list(list_words("heldout")[3::35])
    images = Words().decode(draw_words(key(1), prompts))
    for recogniser in (load_reward_recogniser(), load_heldout_recogniser()):
        assert (recogniser.letters(images, prompts) == 1).float().mean() >= 0.9
        assert recogniser.letters(images[:2], ["zzzzzz", "qqqqqq"]).max() < 0.5
        assert recogniser.letters(torch.ones(1, 1, HEIGHT, WIDTH), ["act"]).tolist() == [0.0]
        assert recogniser.read(torch.empty(0, 1, HEIGHT, WIDTH)) == []


def test_the_unseen_recogniser_is_the_packages_own() -> None:
    """Our session, in one thread, reads what ddddocr's class reads, of good and of broken images."""
    package = import_module("ddddocr")
    prompts = list(list_words("heldout")[:4])
    images = Words().decode(draw_words(key(2), prompts))
    noise = normal(fold_in(key(5), torch.arange(4)), tuple(images.shape))
    images = torch.cat([images, (images + 0.4 * noise).clamp(0, 1)])
    whole = package.DdddOcr(show_ad=False)
    pixels = (images * 255).round().to(torch.uint8).numpy()[:, 0]
    theirs = [whole.classification(Image.fromarray(image)).lower() for image in pixels]
    assert load_heldout_recogniser().read(images) == ["".join(text.split()) for text in theirs]


def test_letters_are_one_minus_the_edit_distance_and_repeats_are_one() -> None:
    """Each per letter; repeats of a CTC network count twice if a blank is between them."""
    best = [0, 1, 1, 0, 1, 2, 2, 2, 0, 0]
    assert recognisers.decode_ctc(np.eye(3)[best], ["", "a", "b"]) == "aab"

    def read(pixels: np.ndarray) -> list[str]:
        return ["river", "RI VER", "rivers", "rover", "r", "", "something else"]

    scores = WordRecogniser(read).letters(torch.zeros(7, 1, HEIGHT, WIDTH), ["river"] * 7)
    assert scores.tolist() == pytest.approx([1.0, 1.0, 0.8, 0.8, 0.2, 0.0, 0.0])


def test_legibility_adds_how_sure_the_recogniser_is(monkeypatch: Patch) -> None:
    """Sureness counts for right words alone: from 0 to 1 as the confidence rises."""
    answers = iter([("R iver", 0.99), ("river", 1.0), ("river", 0.0), ("rover", 0.99), (None, None)])

    class Found:
        def __init__(self, text: str | None, score: float | None) -> None:
            self.txts = None if text is None else (text,)
            self.scores = None if score is None else (score,)

    class Engine:
        def engine(self, image: np.ndarray, **asked: bool) -> Found:
            assert image.shape == (HEIGHT, WIDTH, 3)
            return Found(*next(answers))

    monkeypatch.setattr(recognisers, "load_rapidocr", Engine)
    found = legibility(torch.rand(5, 1, HEIGHT, WIDTH), ["river"] * 5)
    assert found["letters"].tolist() == pytest.approx([1, 1, 1, 0.8, 0])
    assert found["sure"].tolist() == pytest.approx([0.6529, 1, 0, 0, 0], abs=1e-3)
    torch.testing.assert_close(found["score"], found["letters"] + found["sure"])


def test_images_are_read_on_torchs_threads_and_in_order() -> None:
    images = np.arange(12, dtype=np.uint8)[:, None, None].repeat(2, 1)
    together = Barrier(2)

    def read(image: np.ndarray) -> int:
        together.wait(timeout=20)  # two threads have to be here at once
        return int(image[0, 0])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert recognisers.map_threads(read, images) == list(range(12))
        torch.set_num_threads(1)
        assert len(set(recognisers.map_threads(lambda image: get_ident(), images))) == 1
    finally:
        torch.set_num_threads(before)


def test_recognisers_see_eight_bits() -> None:
    seen = []

    def read(pixels: np.ndarray) -> list[str]:
        seen.append(pixels)
        return ["a"] * len(pixels)

    WordRecogniser(read).read(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]).reshape(1, 1, 1, 5))
    assert seen[0].dtype == np.uint8
    assert seen[0].tolist() == [[[0, 0, 128, 255, 255]]]


def test_the_conditioning_tells_letters_and_places() -> None:
    """Anagrams differ; a letter has the place where it is drawn, in halves of an advance; the empty prompt is zeros."""
    cond = Words().encode(["act", "cat", "acts", ""])
    assert cond.tokens.shape == (4, 6, 38)
    assert cond.pooled.shape == (4, 162)
    assert len({tuple(row.flatten().tolist()) for row in cond.tokens}) == 4
    assert not cond.pooled[3].any()
    assert not cond.tokens[3].any()
    hot = [cond.tokens[i, :, 27:].nonzero()[:, 1].tolist() for i in range(3)]
    assert hot == [[3, 5, 7], [3, 5, 7], [2, 4, 6, 8]]
    ink = draw_words(key(0), ["act"])[0, 0].lt(0).any(0).nonzero()
    middles = [WIDTH / 2 + (place - 5) * ADVANCE / 2 for place in (3, 7)]
    assert middles[0] - ADVANCE / 2 <= ink.min() <= middles[0] < middles[1] <= ink.max() <= middles[1] + ADVANCE / 2


@torch.no_grad()
def test_the_network_predicts_the_clean_image() -> None:
    """x - sigma v is what it returns, at every level from 0.1 on; below it the velocity stays finite."""
    model = Words()
    module = model.build()
    sigma = torch.tensor([1.0, LEAST_SIGMA, 0.01])
    x = normal(fold_in(key(0), torch.arange(3)), (3, *model.latent_shape()))
    cond = model.encode(["river", "act", "acts"])
    given = {"hidden_states": x, "encoder_hidden_states": cond.tokens, "pooled_projections": cond.pooled}
    clean = module(**given, timestep=sigma * 1000, return_dict=False)[0]
    v = model.predict(module, x, sigma, cond)
    torch.testing.assert_close((x - sigma.reshape(-1, 1, 1, 1) * v)[:2], clean[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v[2], (x[2] - clean[2]) / LEAST_SIGMA)
    assert len(model.blocks(module)) == CONFIG["num_layers"]
    refuses("the size is 8x8 of 1 frames, expected 24x96 of 1: words has one size", model.latent_shape, 8, 8)
