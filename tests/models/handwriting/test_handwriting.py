"""The built-in model: its data, its two recognisers, its base weights, and the model protocol."""

import numpy as np
import pytest
import torch
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from fluvial.core.random import key
from fluvial.core.sigmas import shifted
from fluvial.models.handwriting import BASE, Handwriting, draw_codes, list_codes, load_digits
from fluvial.models.handwriting.model import CONFIG
from fluvial.models.handwriting.recognisers import DigitRecogniser, load_heldout_recogniser, load_reward_recogniser
from fluvial.models.pixel_model import SHIFT


def test_digits_and_codes_are_split() -> None:
    training, evaluation = load_digits("training"), load_digits("evaluation")
    assert len(training.labels) + len(evaluation.labels) == 1797
    assert abs(len(training.labels) - len(evaluation.labels)) <= 1
    for half in (training, evaluation):
        assert half.pixels.min() == -1
        assert half.pixels.max() == 1
        assert torch.equal(half.labels.unique(), torch.arange(10))
        for label in range(10):
            assert (half.labels[half.starts[label] : half.starts[label + 1]] == label).all()
    train, heldout = list_codes("train"), list_codes("heldout")
    assert len(train) + len(heldout) == 10_000
    assert not set(train) & set(heldout)
    assert 0.19 < len(heldout) / 10_000 < 0.21
    for split in (train, heldout):
        assert all({code[place] for code in split} == set("0123456789") for place in range(4))


@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_the_recogniser_recognises_its_own_digits(seed: int) -> None:
    prompts = [list_codes("train")[(seed * 97 + i * 31) % len(list_codes("train"))] for i in range(16)]
    images = Handwriting().decode(draw_codes(key(seed), prompts))
    assert images.shape == (16, 1, 8, 32)
    assert load_reward_recogniser().characters(images, prompts).mean() > 0.97


def test_recognisers_recognise_unseen_digits() -> None:
    """Each classifier is nearly always right on the half it was not fitted on; the recognisers share no model family."""
    recognisers = {"evaluation": load_reward_recogniser(), "training": load_heldout_recogniser()}
    for half, recogniser in recognisers.items():
        pixels, labels, _ = load_digits(half)
        usable = len(labels) // 4 * 4
        four = pixels[:usable].reshape(-1, 4, 8, 8).permute(0, 2, 1, 3).reshape(-1, 1, 8, 32)
        right = recogniser.read((four + 1) / 2) == labels[:usable].reshape(-1, 4)
        assert (right.float().mean((1, 2)) > 0.97).all()
    families = [
        {type(classifier) for classifier in recogniser.classifiers}
        for recogniser in (load_reward_recogniser(), load_heldout_recogniser())
    ]
    assert families[0].isdisjoint(families[1])


def test_characters_is_the_fraction_of_correct_characters() -> None:
    """One image scored against other codes: a quarter per correct position, averaged over the classifiers."""
    recogniser, images = load_reward_recogniser(), Handwriting().decode(draw_codes(key(3), ["0427"]))
    assert recogniser.read(images).tolist() == [[[0, 4, 2, 7]], [[0, 4, 2, 7]]]
    scores = [float(recogniser.characters(images, [code])) for code in ("0427", "0428", "1427", "0724", "5555")]
    assert scores == [1.0, 0.75, 0.75, 0.5, 0.0]
    assert load_reward_recogniser().read(torch.empty(0, 1, 8, 32)).shape == (2, 0, 4)
    divided = DigitRecogniser(*load_reward_recogniser().classifiers, _AlwaysOne())
    assert float(divided.characters(images, ["0427"])) == pytest.approx(2 / 3)
    assert float(divided.characters(images, ["1427"])) == pytest.approx((0.75 + 0.75 + 0.25) / 3)


class _AlwaysOne:
    def predict(self, X: np.ndarray) -> np.ndarray:
        return np.ones(len(X), dtype=np.int64)


def test_the_empty_prompt_is_zeros_of_the_same_shape() -> None:
    some, none = (Handwriting().encode([prompt, "0427"]) for prompt in ("0427", ""))
    assert torch.equal(none.tokens[1], some.tokens[0])
    assert not none.pooled[0].any()
    assert torch.equal(none.tokens[0, :, 10:], some.tokens[0, :, 10:])  # the positions stay
    assert not none.tokens[0, :, :10].any()
    refuses("is not a code of 4 digits", Handwriting().check_prompt, "")


@pytest.mark.parametrize("prompt", ["042", "04277", "04a7", "०४२७", " 427", "0.27"])
def test_a_prompt_that_is_not_a_code_is_refused(prompt: str) -> None:
    refuses(r"is not a code of 4 digits, expected for example '0427'$", Handwriting().encode, [prompt])


def test_the_transformer_is_small_and_its_schedule_shifted() -> None:
    module = Handwriting().build()
    assert 0.5e6 < sum(p.numel() for p in module.parameters()) < 0.7e6
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 4e6
    assert len(Handwriting().blocks(module)) == CONFIG["num_layers"]
    schedule = Handwriting().schedule(10)
    torch.testing.assert_close(schedule.levels, shifted(10, SHIFT), rtol=1e-6, atol=1e-6)
    assert len(schedule.timesteps) == 10
    images = Handwriting().decode(torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]).reshape(1, 1, 1, 5))
    assert images.flatten().tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
