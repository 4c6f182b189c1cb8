"""Prompts from files: what is read, what is refused in one line, and what is held out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fluvial.engines.data.prompts import read_prompts, split_off
from fluvial.engines.errors import UsageError


def words(prompt: str) -> None:
    """A model whose prompts have at most three words."""
    if len(prompt.split()) > 3:
        raise ValueError(f"prompt {prompt!r} has more than 3 words")


def test_one_prompt_per_line(tmp_path: Path) -> None:
    """Blank lines and spaces around a prompt are dropped; the rest is kept to the letter, in its order."""
    path = tmp_path / "prompts.txt"
    path.write_text("  a red fox \n\n\tzwei Kühe\na red fox\n", encoding="utf-8")
    assert read_prompts(path, check=words) == ("a red fox", "zwei Kühe", "a red fox")


@pytest.mark.parametrize("ending", [".jsonl", ".JSONL", ".json", ".csv", ".tsv", ".parquet"])
def test_records_are_never_trained_on_as_text(tmp_path: Path, ending: str) -> None:
    """A file of records is refused by its name, whatever its lines say."""
    path = tmp_path / f"prompts{ending}"
    path.write_text('{"prompt": "a fox"}\n')
    with pytest.raises(UsageError, match=rf"prompts file .*prompts{ending} holds records .*expected a text file") as error:
        read_prompts(path, check=words)
    assert "\n" not in str(error.value)


def missing(folder: Path) -> Path:
    return folder / "nowhere.txt"


def latin(folder: Path) -> Path:
    (folder / "latin.txt").write_bytes("Kühe".encode("latin-1"))
    return folder / "latin.txt"


def empty(folder: Path) -> Path:
    (folder / "empty.txt").write_text("\n \n")
    return folder / "empty.txt"


def long(folder: Path) -> Path:
    (folder / "long.txt").write_text("a fox\n\na very red fox\n")
    return folder / "long.txt"


def held(folder: Path) -> Path:
    (folder / "held.txt").write_text("a fox\na cow\n")
    return folder / "held.txt"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (missing, "nowhere.txt cannot be read: No such file or directory"),
        (latin, "latin.txt cannot be read: it is not UTF-8 text"),
        (empty, "empty.txt is empty, expected one prompt per line"),
        (long, "long.txt, line 3: prompt 'a very red fox' has more than 3 words"),
        (held, "held.txt, line 2: 'a cow' is held out for evaluation, never trained on"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    """One line that names file and line."""
    with pytest.raises(UsageError) as error:
        read_prompts(make(tmp_path), check=words, heldout=("a cow",))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_tenth_prompt_is_held_out() -> None:
    """The two parts are apart, also where a prompt stands twice, and together they are all."""
    prompts = [f"prompt {i}" for i in range(25)]
    train, heldout = split_off(prompts)
    assert heldout == ("prompt 0", "prompt 10", "prompt 20")
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(prompts)
    assert split_off(["a", "b", "a"]) == (("b",), ("a",))


def test_a_single_prompt_is_trained_on_and_evaluated() -> None:
    """There is no other."""
    assert split_off(["a"]) == (("a",), ("a",))
