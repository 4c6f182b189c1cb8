"""User-defined objective, sampler, reward, recipe and model train from the command line; broken ones end in one line."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import doors, launch
from safetensors.torch import load_file

from fluvial.models.handwriting import BASE

TINY = [*launch.SMALL, "--updates", "2", "--passes.minibatches", "1"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def updates(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's updates, whose weights are other ones than the shipped base, and finite."""
    before, after = load_file(BASE / WEIGHTS), load_file(run / "weights" / WEIGHTS)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    return [record for record in launch.records(run) if "loss" in record]


INSTALLED = """
from dataclasses import dataclass, replace
from helpers import doors
from helpers.doors import bold, walk
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models.handwriting import BASE, Handwriting

@dataclass(frozen=True)
class Pull(doors.Pull):
    \"\"\"The same.

    Args:
        scale: Factor of the loss.
    \"\"\"

def recipe():
    found = doors.recipe()
    sampling = replace(found.method.sampling, sampler=Stochastic("walk"))
    return replace(found, method=Pull(sampling=sampling), rewards=("bold",), updates=1)

class Codes(Handwriting):
    def __init__(self, folder, **options):
        assert (folder / "model_index.json").exists()
        super().__init__(BASE)

    def with_weights(self, folder):
        return Handwriting(folder)

    def release(self):
        pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package on the path as an installer leaves it, with an entry point of every kind."""
    entries = (
        "[fluvial.recipes]\npull = installed_doors:recipe\n[fluvial.methods]\npull = installed_doors:Pull\n"
        "[fluvial.samplers]\nwalk = installed_doors:walk\n[fluvial.rewards]\nbold = installed_doors:bold\n"
        "[fluvial.models]\nCodesPipeline = installed_doors:Codes\n"
    )
    doors.install(tmp_path / "site", "installed_doors", INSTALLED, entries)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    monkeypatch.delitem(sys.modules, "installed_doors")


@pytest.mark.usefixtures("installed")
def test_an_installed_package_is_found_by_its_entry_points(tmp_path: Path, fluvial: Any) -> None:
    """A recipe, an objective, a sampler and a reward by their short names; an adapter by the class of the pipeline."""
    fluvial("train", "pull", "--out", tmp_path / "run")
    assert updates(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "CodesPipeline"}')
    (tmp_path / "prompts.txt").write_text(CODES)
    own = ["--model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--rewards", "helpers.doors:bold"]
    size = ["--pipeline.height", "8", "--pipeline.width", "32", "--updates", "1"]
    fluvial("train", "helpers.doors:recipe", "--out", tmp_path / "own", *own, *size)
    assert updates(tmp_path / "own")


@pytest.mark.long
@pytest.mark.slow
def test_a_method_of_ones_own_is_equal_to_a_built_in(tmp_path: Path) -> None:
    """By its bits on two processes, after a resume, and with the samples of a server; and by the report of a dry run."""
    (tmp_path / "pushed").mkdir()
    small = [*launch.SMALL, "--train", "lora", "--passes.minibatches", "2"]
    with launch.start(
        "serve", "handwriting", "--port", "0", "--micro-batch", "4", "--weights-root", str(tmp_path / "pushed")
    ) as server:
        served = ["--rollout.source", server.address(), "--rollout.servers.weights-folder", str(tmp_path / "pushed")]
        more = ["--updates", "4", "--resume"]
        for way, ranks, flags, runs in (
            ("ranks", 2, [], [["--updates", "2"], more]),
            ("served", 1, served, [["--updates", "4"]]),
        ):
            bits = list[bytes]()
            for name in ("grpo", "helpers.doors:twin"):
                out = tmp_path / f"{way}-{len(bits)}"
                for run in runs:
                    done = launch.fluvial("train", name, "--out", str(out), *small, *flags, *run, ranks=ranks)
                    assert done.returncode == 0, done.stdout + done.stderr
                bits.append(launch.weights(out))
                assert [record["update"] for record in launch.records(out) if "loss" in record] == [2, 4]
            assert bits[0] == bits[1], way
    reports = []
    for name in ("grpo", "helpers.doors:twin"):
        done = launch.fluvial("train", name, *small, "--updates", "2", "--out", str(tmp_path / "dry"), "--dry-run")
        assert done.returncode == 0, done.stdout + done.stderr
        reports.append(re.sub(r"[\d.]+ s\b", "", done.stdout).replace(name, "METHOD"))
    assert reports[0] == reports[1]


BROKEN = """
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from helpers import doors
from fluvial.core.transitions import Transition
from fluvial.engines import recipes

number = 3

def returns_list():
    return [1]

def needs(data):
    return doors.recipe()

def raises():
    raise KeyError("no such file")

def wrong_field():
    return replace(doors.recipe(), updates=0)

class Loose(doors.Pull):
    def loss(self, v):
        return v

@dataclass(frozen=True)
class Crooked(doors.Pull):
    def loss(self, v, rows):
        loss, info = super().loss(v, rows)
        return loss.mean(), info

@dataclass(frozen=True)
class Narrow(doors.Pull):
    def loss(self, v):
        return v

class Plain:
    sampling = None

@dataclass(frozen=True)
class Faulty(doors.Pull):
    def loss(self, v, rows):
        return v.no_such_attribute, None

def of(method):
    return lambda: replace(doors.recipe(), method=method())

crooked, narrow, plain, faulty, kind = of(Crooked), of(Narrow), of(Plain), of(Faulty), of(lambda: doors.Pull)
def one_argument(level):
    return level

def no_transition(level, level_next, *, eta):
    return level

def wide(level, level_next, *, eta):
    return Transition(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3))

def stumbles(level, level_next, *, eta):
    raise KeyError("a key of mine")

def lonely(images):
    return images.mean()

def short(images, prompts):
    return images.mean()

def says_nothing(images, prompts):
    return None

def fails(images, prompts):
    raise RuntimeError("no GPU here")

def no_model():
    return 3
"""
FAILS = "import torch\nraise RuntimeError('this module\\nfails')\n"

# (what is typed, where "own" stands for a recipe that can be trained, exit code, what the line must say)
WRONG = [
    ("train broken:returns_list", 2, "recipe 'broken:returns_list' returned a list, expected a TrainConfig"),
    ("train broken:needs", 2, "recipe 'broken:needs' has the signature (data)"),
    ("train broken:raises", 2, "recipe 'broken:raises' raised KeyError: 'no such file'"),
    ("train broken:wrong_field", 2, "recipe 'broken:wrong_field' raised FieldError: updates is 0"),
    ("train broken:number", 2, "recipe 'broken:number' is of type int"),
    ("train broken:raisess", 2, "broken has no 'raisess'; did you mean 'raises'?"),
    ("train nowhere:recipe", 2, "there is no module 'nowhere'"),
    ("train failing:recipe", 2, "importing failing raised RuntimeError: this module fails"),
    ("train broken:", 2, "expected module:name"),
    ("train broken:crooked", 2, "returned a loss of shape [], expected ["),
    ("train broken:narrow", 2, "has loss(self, v), expected loss(self, v, rows)"),
    ("train broken:plain", 2, "is not a frozen dataclass"),
    ("train broken:faulty", 1, "method broken:Faulty raised AttributeError in loss: 'Tensor'"),
    ("train broken:kind", 2, "method is the class Pull, expected an instance: Pull()"),
    ("own --sampling.sampler broken:one_argument", 2, "has the signature (level), expected a function of"),
    ("own --sampling.sampler broken:no_transition", 2, "no_transition returns a Tensor, expected a Trans"),
    ("own --sampling.sampler broken:wide", 2, "sampler wide: a has shape [2, 3], expected [] or [4]"),
    ("own --sampling.sampler broken:stumbles", 2, "a key of mine"),
    ("own --sampling.sampler flow_sd", 2, "did you mean 'flow_sde'?"),
    ("own --rewards broken:lonely", 2, "has the signature (images)"),
    ("own --rewards broken:short", 1, "expected"),
    ("own --rewards broken:says_nothing", 1, "None"),
    ("own --rewards broken:fails", 1, "RuntimeError (no GPU here)"),
    ("own --rewards failing:reward", 2, "importing failing raised RuntimeError: this module fails"),
    ("own --model broken:no_model --prompts {prompts} --rewards helpers.doors:bold", 2, "broken:no_model"),
    ("own --model broken:none --prompts {prompts} --rewards helpers.doors:bold", 2, "'broken' has no attribute 'none'"),
    ("own --model helpers.doors:adapter --rewards helpers.doors:bold", 2, "needs prompts to train on"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path with a module of broken things, one that fails, and a file of prompts."""
    folder = tmp_path_factory.mktemp("broken")
    for name, text in {"broken.py": BROKEN, "failing.py": FAILS, "prompts.txt": CODES}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("words", "code", "says"), WRONG, ids=[words for words, _, _ in WRONG])
def test_a_broken_one_ends_in_one_line(
    words: str, code: int, says: str, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any
) -> None:
    """Exit code 2, or 1 if it fails in the run; never a traceback."""
    monkeypatch.syspath_prepend(broken)
    importlib.invalidate_caches()
    typed = words.replace("own ", "train helpers.doors:recipe ").format(prompts=broken / "prompts.txt")
    line = fluvial(*typed.split(), "--out", tmp_path / "run", code=code)
    assert says in line
    assert line.startswith("fluvial: ")


@pytest.mark.parametrize(("door", "more"), [("helpers.doors:recipe", []), ("helpers.doors:Pull", TINY)])
def test_a_recipe_or_a_method_of_ones_own_trains_and_resumes(
    tmp_path: Path, fluvial: Any, door: str, more: list[str]
) -> None:
    """With its sampler and reward; a method alone has the defaults of the model.

    Its fields are flags, and what is resumed is found again by its name in the record.
    """
    out = tmp_path / "run"
    for typed, count in (([*more, "--scale", "0.5"], 2), (["--resume", "--updates", "3"], 3)):
        fluvial("train", door, "--out", out, *typed)
        recorded = json.loads((out / "config.json").read_text())["method"]
        assert (recorded["name"], recorded["scale"]) == ("helpers.doors:Pull", 0.5)
        assert more or recorded["sampling"]["sampler"] == {"kind": "helpers.doors:walk", "eta": 0.5}
        assert len(updates(out)) == count
    shown = fluvial("train", door, "--help-all")
    assert "--scale" in shown
    assert "--kl.coef" not in shown


def test_a_built_in_recipe_takes_an_own_sampler_and_reward(tmp_path: Path, fluvial: Any) -> None:
    """They are named by flags; the other recipe gives other weights."""
    own = ["--sampling.sampler", "helpers.doors:walk", "--sampling.sampler.eta", "0.5"]
    rewards = ["--rewards", "helpers.doors:bold", "characters=0.5"]
    fluvial("train", "handwriting", "--out", tmp_path / "run", *TINY, *own, *rewards)
    assert set(updates(tmp_path / "run")[0]["rewards"]) == {"helpers.doors:bold", "characters"}


CODES = "0427\n1999\n3141\n8650\n"


def test_an_own_model_trains(tmp_path: Path, fluvial: Any) -> None:
    """It comes with a file of prompts and a reward, since there is no job for it."""
    (tmp_path / "prompts.txt").write_text(CODES)
    own = ["--model", "helpers.doors:adapter", "--prompts", tmp_path / "prompts.txt", "--rewards", "helpers.doors:bold"]
    fluvial("train", "helpers.doors:recipe", "--out", tmp_path / "run", *own)
    assert updates(tmp_path / "run")
