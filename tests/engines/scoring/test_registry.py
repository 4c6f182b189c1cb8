"""Which rewards a run uses: by name, by module, from an installed package; what is not a reward is refused in one line."""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers import tiny_rewards
from helpers.refusals import refuses
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.scoring.registry import check_rewards, select, strip_weight
from fluvial.engines.scoring.runner import score

REWARDS: dict[str, Any] = {"brightness": tiny.brightness, "contrast": tiny.contrast}
OWN = """
import functools
from pathlib import Path
from typing import Literal

def bright(images, prompts):
    return images.flatten(1).mean(1)

def one(images):
    return images

async def later(images, prompts):
    return images

class Scorer:
    def __call__(self, images, prompts):
        return [0.0] * len(prompts)

class Scaled:
    def __init__(self, scale: float, *, name: str = "", sharp: bool | Literal["low", "high"] = False) -> None:
        if scale <= 0:
            raise ValueError(f"scale is {scale:g}, expected above 0")
        self.options = scale, name, sharp

    def __call__(self, images, prompts):
        return [self.options[0]] * len(prompts)

def tuned(images, prompts, level: int = 1, folder: Path = Path()):
    return [level, folder]

scorer = Scorer()
partial = functools.partial(bright)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """User-defined modules, one of which cannot be imported."""
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


OPTIONS: list[tuple[str, tuple[Any, ...], float]] = [
    ("scale=2", (2.0, "", False), 1.0),
    ("scale=2=0.5", (2.0, "", False), 0.5),
    ("scale=2,name=a=b,sharp=true", (2.0, "a=b", True), 1.0),
    ("scale=2,sharp=low,name=http://host:1/x?y=z=3", (2.0, "http://host:1/x?y=z", "low"), 3.0),
]


@pytest.mark.parametrize(("text", "expected", "weight"), OPTIONS)
def test_options_of_a_class(text: str, expected: tuple[Any, ...], weight: float) -> None:
    """Each of its type, and the weight behind the last."""
    (((name, (made, found)),)) = select(REWARDS, (f"own_rewards:Scaled:{text}",)).items()
    assert (name, found) == ("own_rewards:Scaled", weight)
    assert made.options == expected  # type: ignore[attr-defined]
    assert strip_weight(f"own_rewards:Scaled:{text}") == f"own_rewards:Scaled:{text.removesuffix(f'={weight:g}')}"


def test_options_of_a_function_and_of_a_client() -> None:
    """A function's are its further parameters; a client's those of the server and its own."""
    (found,) = select(REWARDS, ("own_rewards:tuned:level=3,folder=a/b=2",)).values()
    assert found[1] == 2.0
    assert found[0](None, ["x"]) == [3, Path("a/b")]
    ((name, (client, _)),) = select(REWARDS, ("flow_factory:url=http://127.0.0.1:9,batch=3,timeout=5",)).items()
    made: Any = client
    assert (name, made.batch, made.server.timeout) == ("flow_factory", 3, 5.0)
    ((name, (plain, weight)),) = select({}, ("jpeg_incompressibility=-1",)).items()
    assert (name, weight) == ("jpeg_incompressibility", -1.0)
    assert len(score(plain, torch.zeros(2, 3, 8, 8), ["", ""])) == 2
    assert strip_weight("jpeg=0.5") == "jpeg"
    assert strip_weight("mine:score=0.5") == "mine:score"


def test_options_of_a_reward_model(tmp_path: Path) -> None:
    """Its weights from a folder, its device and its batch; it is loaded when the run is built."""
    tiny_rewards.save_clip(tmp_path)
    ((name, (reward, weight)),) = select({}, (f"pickscore:device=cpu,batch=2,weights={tmp_path}=0.5",)).items()
    assert (name, weight) == ("pickscore", 0.5)
    assert score(reward, tiny_rewards.images(3), ["a fox", "two", "x"]).shape == (3,)


@pytest.mark.parametrize("name", ["bright", "scorer", "partial", "Scorer"])
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
        (("own_rewards:Scaled",), r"rewards 'own_rewards:Scaled' needs the option scale: write scale=value after its name"),
        (("own_rewards:Scaled:scael=2",), r"has no option 'scael', expected scale, name, sharp; did you mean 'scale'\?"),
        (("own_rewards:Scaled:scale=much",), r"rewards 'own_rewards:Scaled': scale is 'much', expected a number$"),
        (("own_rewards:Scaled:scale=2,sharp=3",), r"sharp is '3', expected low or high or true or false"),
        (("own_rewards:Scaled:scale=-1",), r"rewards 'own_rewards:Scaled': scale is -1, expected above 0"),
        (("own_rewards:Scaled:scale=2,scale=3",), r"which names an option twice"),
        (("own_rewards:Scaled:scale=2,sharp",), r"whose option 'sharp' is not name=value: write own_rewards:Scaled:opt"),
        (("own_rewards:bright:scale=2",), r"has no option 'scale', it takes none"),
        (("brightness:scale=2",), r"rewards 'brightness' has no option 'scale', it takes none"),
        (("jpeg:quality=3",), r"rewards 'jpeg' has no option 'quality', it takes none"),
        (("pickscore:devise=cpu",), r"has no option 'devise', expected weights, .*; did you mean 'device'\?"),
        (("pickscore:batch=many,weights=x",), r"rewards 'pickscore': batch is 'many', expected a whole number"),
        (("pickscore:weights=/nowhere=0.5",), r"^rewards 'pickscore': .*/nowhere"),
        (("flow_factory",), r"rewards 'flow_factory' needs the option url"),
        (("flow_factory:url=http://127.0.0.1:9,batch=x",), r"batch is 'x', expected a whole number"),
        (("math:pi",), r"is of type float, expected a function"),
    ],
)
def test_what_is_no_reward_is_refused(names: Sequence[str], says: str) -> None:
    """In one line that says what was expected."""
    refuses(says, select, REWARDS, names)


def test_a_reward_of_videos_is_refused_where_samples_are_images() -> None:
    """Before its weights are asked for; one of the job by that name is taken."""
    refuses(r"^rewards 'videoreward' scores videos, and samples are images", select, {}, ("videoreward",), videos=False)
    assert select({"videoreward": tiny.brightness}, ("videoreward",), videos=False)


def test_evaluators_are_checked_too() -> None:
    """The message names the evaluator."""

    def one(images: Tensor) -> Tensor:
        return images

    check_rewards(REWARDS)
    refuses(
        r"evaluator 'mine' has the signature .*, expected a function of \(images, prompts\)",
        check_rewards,
        {**REWARDS, "mine": one},
        label="evaluator",
    )
