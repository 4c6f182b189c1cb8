"""Suites: the built-in ones hold together, one's own is a file or an object, and wrong ones are one line."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.refusals import refuses

from fluvial.engines.data.prompts import read_heldout
from fluvial.engines.errors import UsageError
from fluvial.engines.run.evaluation.config import SuiteConfig
from fluvial.engines.run.evaluation.folder import SUITES, find_suite
from fluvial.engines.scoring.options import parse
from fluvial.engines.scoring.registry import built_in

FILE = """
rewards = ["jpeg", "mine:score"]
seeds = 3
guidance = 4.5

[[prompts]]
prompt = "three cats"
tag = "counting"
include = [{class = "cat", count = 3}]

[[prompts]]
prompt = "a red fox"
"""


def anything(text: str) -> None:
    """Take every text for a prompt."""


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_a_held_out_part_and_rewards_that_exist(name: str) -> None:
    suite = find_suite(name)
    assert read_heldout(suite.prompts, (), check=anything)
    assert suite.seeds
    assert suite.steps
    for reward in suite.rewards:
        assert parse(reward, {*built_in()}, field="rewards")[0] in built_in()


def test_a_file_is_a_whole_suite(tmp_path: Path) -> None:
    """With prompts of its own, their tags and metadata."""
    (tmp_path / "mine.toml").write_text(FILE)
    suite = find_suite(str(tmp_path / "mine.toml"))
    assert suite == SuiteConfig((str(tmp_path / "mine.toml"),), ("jpeg", "mine:score"), seeds=3, guidance=4.5)
    cats, fox = read_heldout(suite.prompts, (), check=anything)
    assert (cats.text, cats.tag, cats.metadata["include"]) == ("three cats", "counting", [{"class": "cat", "count": 3}])
    assert (fox.text, fox.tag) == ("a red fox", None)


def test_a_file_may_be_json(tmp_path: Path) -> None:
    record = tomllib.loads(FILE)
    (tmp_path / "mine.json").write_text(json.dumps(record))
    (tmp_path / "mine.toml").write_text(FILE)
    suite, other = find_suite(str(tmp_path / "mine.json")), find_suite(str(tmp_path / "mine.toml"))
    assert replace(suite, prompts=()) == replace(other, prompts=())
    found, expected = (read_heldout(each.prompts, (), check=anything) for each in (suite, other))
    assert [(prompt.text, prompt.tag, prompt.metadata) for prompt in found] == [
        (prompt.text, prompt.tag, prompt.metadata) for prompt in expected
    ]
    for text, says in {"[1]": "holds a list, expected an object of fields", "{": "is not JSON"}.items():
        (tmp_path / "mine.json").write_text(text)
        refuses(re.escape(says), find_suite, str(tmp_path / "mine.json"))


def test_a_file_names_files_beside_it_and_prompt_sets(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('prompts = ["own.txt", "@animals"]\nrewards = ["jpeg"]\n')
    (tmp_path / "own.txt").write_text("a red fox\n")
    suite = find_suite(str(tmp_path / "mine.toml"))
    assert suite.prompts == (str(tmp_path / "own.txt"), "@animals")
    assert read_heldout(suite.prompts, (), check=anything)[0].text == "a red fox"


def test_a_suite_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["from fluvial.engines.run.evaluation.config import SuiteConfig", "SUITE = SuiteConfig(('@ocr',), ('ocr',))"]
    (tmp_path / "mysuites.py").write_text("\n".join([*lines, "WRONG = ['ocr']", "EMPTY = SuiteConfig(('@ocr',))"]))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_suite("mysuites:SUITE") == SuiteConfig(("@ocr",), ("ocr",))
    for name, says in {"WRONG": "is a list, expected a SuiteConfig", "EMPTY": "has no rewards"}.items():
        refuses(says, find_suite, f"mysuites:{name}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompts = [", "is not TOML"),
        ('prompts = ["a.txt"]\n', "has no rewards, expected at least one"),
        ('rewards = ["jpeg"]\n', "has no prompts, expected at least one"),
        ('rewards = ["jpeg"]\nprompts = "a.txt"\n', "prompts is 'a.txt', expected a list of text"),
        ('rewards = ["jpeg"]\nprompts = ["a.txt", {prompt = "a"}]\n', "expected a list of text"),
        ('rewards = [1]\nprompts = ["a.txt"]\n', "rewards is [1], expected a list of text"),
        ('rewards = ["jpeg"]\nprompts = ["a.txt"]\nseed = 3\n', "has the unknown field 'seed', expected prompts, rewards"),
        ('rewards = ["jpeg"]\nprompts = ["a.txt"]\nseeds = "3"\n', "seeds is a str, expected an integer"),
        ('rewards = ["jpeg"]\nprompts = ["a.txt"]\nsolver = "eule"\n', "did you mean 'euler'"),
        ('rewards = ["jpeg=2"]\nprompts = ["a.txt"]\n', "evaluators have no weights"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)) as error:
        find_suite(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("name", "says"), [("gen-eval", "did you mean 'geneval'?"), ("nothing.toml", "No such file")])
def test_a_suite_that_is_not_there(name: str, says: str) -> None:
    refuses(re.escape(says), find_suite, name)
