"""Prompt sets: parts that share no prompt, records that the rewards understand, the same everywhere, and wrong ones."""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fluvial.engines.data.prompt_sets import PROMPT_SETS, read_set
from fluvial.engines.data.prompts import hold_out, read_heldout, read_prompts, read_sources
from fluvial.engines.errors import UsageError
from fluvial.models.rewards.geneval import Detection, GenEval
from fluvial.models.rewards.shared.text import extract_quoted

# Number of prompts of each part, and the beginning of the SHA-256 of all records: a set never changes unnoticed.
CONTENTS = {
    "ocr": (3460, 400, "a6e44429671c6174"),
    "geneval": (2455, 256, "3b5dd668db9155ba"),
    "animals": (585, 130, "24687d5ad2d22915"),
    "counting": (1725, 200, "30581c816dfc7e3c"),
    "drawbench-like": (1882, 200, "b962fca2668174b3"),
    "codes-low": (4026, 974, "f4ba8e821902a430"),
    "codes-high": (4001, 999, "50fe4b73fa804278"),
}
TAGS = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}
WITH_OBJECTS = ("geneval", "counting")


def anything(text: str) -> None:
    """Take every text for a prompt."""


def of(name: str, part: Any) -> list[dict[str, Any]]:
    return [row.columns for row in read_set(f"@{name}", part)]


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_the_parts_share_no_prompt_and_repeat_none(name: str) -> None:
    """And they are the same everywhere, whatever the seed of Python's hashes."""
    parts = [of(name, part) for part in ("train", "heldout")]
    train, heldout = ([record["prompt"] for record in part] for part in parts)
    assert not {*train} & {*heldout}
    assert len({*train}) == len(train) > len(heldout) == len({*heldout}) > 0
    assert (len(train), len(heldout), hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]) == CONTENTS[name]


def test_ocr_asks_for_quoted_texts_and_holds_texts_out() -> None:
    """The reward finds each text, and no held-out text is drawn in training."""
    train, heldout = ({extract_quoted(record["prompt"]) for record in of("ocr", part)} for part in ("train", "heldout"))
    assert not train & heldout
    assert all(text.isprintable() for text in train | heldout)


def test_the_held_out_animals_are_in_no_training_prompt() -> None:
    alone = {record["prompt"] for record in of("animals", "heldout") if record["tag"] == "alone"}
    assert len(alone) == 10
    assert not [
        record for record in of("animals", "train") for animal in alone if f"{record['prompt']} ".startswith(f"{animal} ")
    ]


class Drawn:
    """A detector that finds exactly what a record asks for: objects side by side, or where they are to be."""

    PLACES: ClassVar = {"left of": (0, 40), "right of": (80, 40), "above": (40, 0), "below": (40, 80)}

    def __init__(self, missing: bool = False) -> None:
        self.missing = missing
        self.record: dict[str, Any] = {}

    def __call__(self, image: torch.Tensor) -> dict[str, list[Detection]]:
        found: dict[str, list[Detection]] = {}
        for entry in self.record["include"]:
            x, y = self.PLACES[entry["position"][0]] if "position" in entry else (40, 40)
            count = entry["count"] - (1 if self.missing else 0)
            found.setdefault(entry["class"], []).extend([Detection((x, y, x + 10, y + 10), 0.99)] * count)
        return found


@pytest.mark.parametrize("name", WITH_OBJECTS)
@pytest.mark.parametrize("part", ["train", "heldout"])
def test_records_are_those_of_geneval(name: str, part: Any) -> None:
    """GenEval's rules pass an image with what the record asks for, and fail one without; the prompt names each class."""
    found = of(name, part)
    assert {record["tag"] for record in found} == (TAGS if name == "geneval" else {"counting"})
    for record in found:
        wanted = iter([entry["color"] for entry in record["include"] if "color" in entry])
        for missing in (False, True):
            detector = Drawn(missing)
            detector.record = record

            def colours(crops: Any, name: str, record: dict[str, Any] = record) -> list[str]:
                (colour,) = {entry["color"] for entry in record["include"] if entry["class"] == name}
                return [colour] * len(crops)

            reward = GenEval(detector, colours, score="correct")
            image = torch.zeros(1, 3, 100, 100)
            assert reward(image, [record["prompt"]], [record])["score"].item() == float(not missing), record
        assert all(colour in record["prompt"] for colour in wanted)
        assert all(
            entry["class"].split()[0][:3] in record["prompt"] for entry in record["include"] if entry["class"] != "person"
        )


def test_a_position_is_that_of_the_first_object_to_the_second() -> None:
    record = next(record for record in of("geneval", "train") if record["tag"] == "position")
    reference, placed = record["include"]
    where, index = placed["position"]
    assert index == 0
    first, second = record["prompt"].removeprefix("a photo of ").split(f" {where} ")
    assert first.endswith(placed["class"])
    assert second.endswith(reference["class"])


def test_a_run_trains_on_one_part_and_holds_out_the_other() -> None:
    train, weights = read_sources(["@ocr=2"], check=anything)
    kept, heldout = hold_out(train, ["@ocr=2"], check=anything)
    assert kept == train
    assert weights == {"@ocr": 2.0}
    assert [prompt.text for prompt in heldout] == [record["prompt"] for record in of("ocr", "heldout")]
    assert {prompt.source for prompt in (*train, *heldout)} == {"@ocr"}
    assert heldout == read_heldout(["@ocr"], ["@ocr"], check=anything)


def test_a_set_stands_beside_a_file(tmp_path: Path) -> None:
    """Every tenth prompt of the file is held out, also where the set has it too, and the held-out part of the set."""
    file = tmp_path / "own.txt"
    shared, *_ = (record["prompt"] for record in of("animals", "train"))
    file.write_text(f"{shared}\n" + "".join(f"prompt {number}\n" for number in range(1, 20)))
    words = [str(file), "@animals"]
    train, heldout = hold_out(read_sources(words, check=anything)[0], words, check=anything)
    assert [prompt.text for prompt in heldout if prompt.source == "own"] == [shared, "prompt 10"]
    assert len([prompt for prompt in heldout if prompt.source == "@animals"]) == CONTENTS["animals"][1]
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in heldout}


def test_a_set_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownset.py").write_text(
        "def mine(part):\n    yield {'prompt': f'a {part} fox', 'tag': 'fox', 'count': 1}\n"
        "def empty(part):\n    return []\n"
        "def wrong(part):\n    return ['a fox']\n"
        "def raises(part):\n    raise OSError('no\\nfile')\n"
        "def other():\n    return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (prompt,) = read_prompts(Path("@ownset:mine"), check=anything, part="heldout")
    assert (prompt.text, prompt.tag, prompt.metadata["count"], prompt.source) == ("a heldout fox", "fox", 1, "@ownset:mine")
    for name, says in {
        "ownset:empty": "has no prompt in the part train",
        "ownset:wrong": "train record 1 is a str, expected a mapping with a column prompt",
        "ownset:raises": "raised OSError for the part train: no file",
        "ownset:other": "expected a function of (part)",
        "ocrr": "did you mean 'ocr'?",
    }.items():
        with pytest.raises(UsageError) as error:
            read_prompts(Path(f"@{name}"), check=anything)
        assert says in str(error.value)
        assert "\n" not in str(error.value)
