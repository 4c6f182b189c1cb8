"""Pre-training of the built-in models: the shipped weights are made again, images misspell, wrong settings are refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import launch
from helpers.marks import long
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fluvial.bench import __main__ as bench
from fluvial.bench import pretrain as made_by
from fluvial.core.random import fold_in, key
from fluvial.engines.cli import main as cli
from fluvial.engines.run.log.progress import RunProgress
from fluvial.models import handwriting, words

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=6)


@given(WORDS, st.floats(0, 1), st.integers(0, 2**32))
def test_a_misspelt_prompt_keeps_its_length(prompts: list[str], rate: float, seed: int) -> None:
    """It does not depend on the prompts after it, and at a rate of 0 it is the prompt."""
    drawn = made_by.misspell(key(seed), prompts, rate, LETTERS)
    assert [len(word) for word in drawn] == [len(prompt) for prompt in prompts]
    assert set("".join(drawn)) <= set(LETTERS)
    assert made_by.misspell(key(seed), prompts, 0.0, LETTERS) == prompts
    assert made_by.misspell(key(seed), prompts[:1], rate, LETTERS) == drawn[:1]


def test_letters_are_replaced_at_the_rate() -> None:
    """A letter differs with probability rate (1 - 1 / 26), to 4 standard deviations; what it becomes is uniform."""
    rate, prompts = 0.3, ["aaaaaa"] * 2000
    drawn = made_by.misspell(fold_in(key(0), 1), prompts, rate, LETTERS)
    text = "".join(drawn)
    expected = rate * 25 / 26
    wrong = sum(letter != "a" for letter in text) / len(text)
    assert wrong == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(text)) ** 0.5)
    counts = [text.count(letter) for letter in LETTERS[1:]]
    mean = len(text) * rate / 26
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--errors -0.1", "--errors is -0.1"),
        ("--seed -1", "--seed is -1"),
        ("--batch 0", "--batch is 0"),
        ("--out {tmp}/file", "which cannot be made"),
        ("--out {tmp}/model", "model already holds a model"),
    ],
)
def test_wrong_settings_are_one_line(words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, before anything is written."""
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    out = [] if "--out" in words else ["--out", str(tmp_path / "base")]
    assert cli.run(["pretrain-words", *words.format(tmp=tmp_path).split(), *out], bench.main) == 2
    assert line in launch.one_line(capsys.readouterr().err)
    assert not (tmp_path / "base").exists()


class Enough(Exception):
    """Enough updates have been made."""


@pytest.mark.parametrize(
    ("begin", "recorded"),
    [
        (made_by.handwriting_pretraining, {1: 1.92541, 10: 1.26558}),
        (made_by.handwriting_unet_pretraining, {1: 1.11510, 10: 0.36120}),
        (made_by.words_pretraining, {1: 20.3142, 5: 8.38934, 10: 5.75220}),
        long(made_by.edit_words_pretraining, {1: 0.128199, 3: 0.134228}),
        long(made_by.handwriting_pretraining, {1: 1.92541, 10: 1.26558, 20: 1.04307, 40: 0.93300}),
        long(made_by.handwriting_unet_pretraining, {1: 1.11510, 10: 0.36120, 20: 0.26531, 40: 0.20170}),
    ],
)
def test_pretraining_begins_as_recorded(
    begin: Callable[[Path], Any], recorded: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, noise, levels, network and optimizer are those of the shipped weights: the first updates have their errors."""
    errors: list[float] = []

    def advance(self: RunProgress, numbers: Mapping[str, float], seconds: object) -> None:
        errors.append(numbers["error"])
        if len(errors) == max(recorded):
            raise Enough

    monkeypatch.setattr(RunProgress, "advance", advance)
    with pytest.raises(Enough):
        made_by.pretrain(begin(tmp_path / "base"))
    assert {update: errors[update - 1] for update in recorded} == pytest.approx(recorded, rel=2e-3)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "shipped", "most"),
    [
        # 400 updates amplify rounding: two threads instead of one move the weights by 0.0005 of their length.
        ("handwriting", handwriting.BASE, 0.005),
        # 2,200 updates: with the kernels of another processor (AVX2) they moved by 0.38. Untrained ones are 0.53 away.
        ("words", words.BASE, 0.5),
        # Those of `words`, from which it starts, are 0.16 away.
        ("edit-words", words.EDIT_BASE, 0.144),
    ],
)
def test_pretraining_reproduces_the_base_weights(tmp_path: Path, name: str, shipped: Path, most: float) -> None:
    """The recorded command gives the shipped weights, but for rounding, which its updates amplify."""
    done = launch.program("fluvial.bench", f"pretrain-{name}", "--out", str(tmp_path / "base"), timeout=3000)
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (tmp_path / "base", shipped))
    assert set(ours) == set(theirs)
    distance = sum(float(((ours[part].double() - theirs[part].double()) ** 2).sum()) for part in theirs) ** 0.5
    length = sum(float((theirs[part].double() ** 2).sum()) for part in theirs) ** 0.5
    assert distance < most * length
    found, expected = (json.loads((folder / "made-by.json").read_text()) for folder in (tmp_path / "base", shipped))
    for kind in ("heldout_exact", "heldout_score"):
        assert found[kind] == pytest.approx(expected[kind], abs=0.07)
