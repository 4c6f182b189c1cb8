"""Which rewards a run uses: by name, by module, from an installed package; what is not a reward is refused in one line."""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs as tiny
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError
from fluvial.engines.rewards.registry import check_rewards, select

REWARDS: dict[str, Any] = {"brightness": tiny.brightness, "contrast": tiny.contrast}
OWN = """
import functools

def bright(images, prompts):
    return images.flatten(1).mean(1)

def one(images):
    return images

async def later(images, prompts):
    return images

class Scorer:
    def __call__(self, images, prompts):
        return [0.0] * len(prompts)

scorer = Scorer()
partial = functools.partial(bright)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A person's own modules, one of which cannot be imported."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "own_broken_rewards.py").write_text("import torch\ntorch.nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("own_rewards", "own_broken_rewards"):
        sys.modules.pop(name, None)


def test_rewards_that_are_asked_for() -> None:
    """The first of the job if none is named, else each with its weight, in the order of the names."""
    assert select(REWARDS, ()) == {"brightness": (tiny.brightness, 1.0)}
    found = select(REWARDS, ("contrast=-0.5", "brightness"))
    assert list(found.items()) == [("contrast", (tiny.contrast, -0.5)), ("brightness", (tiny.brightness, 1.0))]
    assert select({}, ()) == {}


@pytest.mark.parametrize("name", ["bright", "scorer", "partial"])
def test_a_reward_of_a_module(name: str) -> None:
    """A function, an object that can be called, and a partial function."""
    (found,) = select(REWARDS, (f"own_rewards:{name}=2",)).values()
    assert callable(found[0])
    assert found[1] == 2.0


def test_a_reward_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the name of its entry point, after the job's own."""
    point = EntryPoint("bright", "own_rewards:bright", "fluvial.rewards")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "fluvial.rewards" else [])
    ((name, (reward, weight)),) = select(REWARDS, ("bright=0.5",)).items()
    assert (name, weight) == ("bright", 0.5)
    assert getattr(reward, "__module__", "") == "own_rewards"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("brightnes",), r"rewards is 'brightnes', expected one of brightness, contrast, .*did you mean 'brightness'\?"),
        (("brightness", "brightness=2"), r"which names 'brightness' twice: name each reward once"),
        (("brightness=much",), r"weight 'much' is not a number other than 0: give one, e.g. brightness=0.5"),
        (("brightness=",), r"weight '' is not a number"),
        (("brightness=0",), r"weight '0' is not a number other than 0"),
        (("brightness=nan",), r"weight 'nan' is not a number"),
        (("brightness=inf",), r"weight 'inf' is not a number"),
        (("nowhere:reward",), r"there is no module 'nowhere'"),
        (("own_broken_rewards:reward",), r"importing own_broken_rewards raised AttributeError: .*nothing"),
        (("own_rewards:bridge",), r"own_rewards has no 'bridge'; did you mean 'bright'\?"),
        (("own_rewards:one",), r"has the signature \(images\), expected a function of \(images, prompts\)"),
        (("own_rewards:later",), r"is an async function, expected a function of \(images, prompts\): define it with def"),
        (("own_rewards:Scorer",), r"is a class, expected a function of \(images, prompts\)"),
        (("math:pi",), r"is of type float, expected a function"),
    ],
)
def test_what_is_no_reward_is_refused(names: Sequence[str], says: str) -> None:
    """In one line that says what was expected."""
    with pytest.raises(UsageError, match=says) as error:
        select(REWARDS, names)
    assert "\n" not in str(error.value)


def test_evaluators_are_checked_too() -> None:
    """The message names the evaluator."""

    def one(images: Tensor) -> Tensor:
        return images

    check_rewards(REWARDS)
    with pytest.raises(
        UsageError, match=r"evaluator 'mine' has the signature .*, expected a function of \(images, prompts\)"
    ):
        check_rewards({**REWARDS, "mine": one}, label="evaluator")
