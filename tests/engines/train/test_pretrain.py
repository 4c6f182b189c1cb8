"""Pre-training of the built-in models: images that misspell, and settings that are refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluvial.core.random import fold_in, key
from fluvial.engines.cli import main as cli
from fluvial.engines.train.pretrain import PretrainConfig, misspelt

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=6)


@given(WORDS, st.floats(0, 1), st.integers(0, 2**32))
def test_a_misspelt_prompt_keeps_its_length(prompts: list[str], rate: float, seed: int) -> None:
    """It does not depend on the prompts after it, and at a rate of 0 it is the prompt."""
    drawn = misspelt(key(seed), prompts, rate, LETTERS)
    assert [len(word) for word in drawn] == [len(prompt) for prompt in prompts]
    assert set("".join(drawn)) <= set(LETTERS)
    assert misspelt(key(seed), prompts, 0.0, LETTERS) == prompts
    assert misspelt(key(seed), prompts[:1], rate, LETTERS) == drawn[:1]


def test_letters_are_replaced_at_the_rate() -> None:
    """A letter differs with probability rate (1 - 1 / 26), to 4 standard deviations; what it becomes is uniform."""
    rate, prompts = 0.3, ["aaaaaa"] * 2000
    drawn = misspelt(fold_in(key(0), 1), prompts, rate, LETTERS)
    text = "".join(drawn)
    expected = rate * 25 / 26
    wrong = sum(letter != "a" for letter in text) / len(text)
    assert wrong == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(text)) ** 0.5)
    counts = [text.count(letter) for letter in LETTERS[1:]]
    mean = len(text) * rate / 26
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts)


def test_a_rate_that_is_no_probability_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python and on the command line, before anything is written."""
    with pytest.raises(ValueError, match="errors"):
        PretrainConfig(tmp_path / "base", errors=1.5)
    assert cli.run(["pretrain", "words", "--errors", "-0.1", "--out", str(tmp_path / "base")]) == 2
    said = capsys.readouterr().err.strip()
    assert "--errors is -0.1" in said
    assert "\n" not in said
    assert not (tmp_path / "base").exists()
