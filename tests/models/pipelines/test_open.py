"""User-defined adapters: they enter through an argument, `module:name` or an entry point; a broken one is one line."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import Patch
from helpers.refusals import refuses
from torch import Tensor, nn

import fluvial.models.pipelines.open as opening
from fluvial.models import DiffusionModel, check_model, load_adapter, open_model
from fluvial.models.handwriting import Handwriting
from fluvial.models.pipelines.open import has_adapter


class Toy(Handwriting):
    """A user-defined model over a folder: its predictions are multiplied by a number."""

    def __init__(self, folder: Path | None = None, *, trust_remote_code: bool = False, gain: float = 1.0) -> None:
        super().__init__(None)
        self.folder, self.gain = folder, gain

    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any, *, timestep: Tensor | None = None) -> Tensor:
        return self.gain * super().predict(module, x, sigma, cond, timestep=timestep)

    def with_weights(self, folder: Path) -> "Toy":
        return Toy(folder, gain=self.gain)

    def release(self) -> None:
        """Free nothing."""


class NoDecode(Toy):
    decode = guide = property()


class WrongSignature(Toy):
    def predict(self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:  # type: ignore[override]
        return x


class WrongPrediction(Toy):
    prediction = "score"  # type: ignore[assignment]


class OneTarget(Toy):
    lora_targets = "linear"  # type: ignore[assignment]


class NotAMethod(Toy):
    blocks = [nn.Linear(1, 1)]  # type: ignore[assignment]  # noqa: RUF012


def failing(*args: Any, **kwargs: Any) -> Toy:
    raise RuntimeError("no licence\nfor this model")


OBJECT = Toy(gain=3.0)
NUMBER = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: Patch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "own_adapter", sys.modules[__name__])
    (tmp_path / "own_raises.py").write_text("raise OSError('driver\\nis missing')")
    (tmp_path / "own_exits.py").write_text("import sys\nsys.exit('goodbye')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("own_raises", "own_exits"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    return tmp_path / "model"


def declare(monkeypatch: Patch, value: str) -> None:
    points = {"fluvial.models": [EntryPoint("ToyPipeline", value, "fluvial.models")]}
    monkeypatch.setattr(opening, "entry_points", lambda group: points.get(group, []))


@pytest.mark.parametrize("adapter", [Toy, "own_adapter:Toy"], ids=["class", "module:name"])
def test_an_adapter_is_given_by_the_caller(adapter: Any, folder: Path) -> None:
    model = open_model(folder, adapter=adapter, gain=2.0)
    assert isinstance(model, Toy)
    assert (model.folder, model.gain) == (folder, 2.0)
    x, cond = torch.ones(1, *model.event), model.encode(["0427"])
    module = model.build()
    plain = Handwriting(None).predict(module, x, torch.ones(1), cond)
    assert torch.equal(model.predict(module, x, torch.ones(1), cond), 2 * plain)


def test_an_installed_package_declares_an_adapter(folder: Path, monkeypatch: Patch) -> None:
    assert not has_adapter(folder)
    refuses("holds a ToyPipeline, which has no adapter, expected one of StableDiff", open_model, folder)
    declare(monkeypatch, "own_adapter:Toy")
    assert has_adapter(folder)
    model = open_model(folder, gain=4.0)
    assert isinstance(model, Toy)
    assert (model.folder, model.gain) == (folder, 4.0)
    declare(monkeypatch, "own_raises:Toy")
    refuses(r"^adapter 'entry point ToyPipeline = own_raises:Toy' cannot be imported: OSError:", open_model, folder)


@pytest.mark.parametrize(("spec", "gain"), [("own_adapter:OBJECT", 3.0), ("own_adapter:Toy", 1.0)])
def test_module_and_name_stand_for_a_model(spec: str, gain: float) -> None:
    model: Any = load_adapter(spec)
    assert isinstance(model, Toy)
    assert model.gain == gain
    assert (model is OBJECT) == spec.endswith("OBJECT")


BROKEN: list[tuple[str, str]] = [
    ("own_adapter", "adapter 'own_adapter': expected module:name"),
    ("own_absent:Toy", "adapter 'own_absent:Toy' cannot be imported: ModuleNotFoundError: No module named 'own_absent'"),
    ("own_raises:Toy", "cannot be imported: OSError: driver is missing"),
    ("own_exits:Toy", "cannot be imported: SystemExit: goodbye"),
    ("own_adapter:Toi", r"cannot be imported: AttributeError: .* has no attribute 'Toi'"),
    ("own_adapter:NUMBER", "is of type int, expected a DiffusionModel, or a class or function of one"),
    ("own_adapter:failing", "adapter 'own_adapter:failing' cannot be opened: RuntimeError: no licence for this model"),
    ("own_adapter:NoDecode", "an object of type NoDecode, which is not a (Diffusion|Pipeline)Model: it has no decode"),
    ("own_adapter:WrongSignature", r"WrongSignature.predict has the signature \(module.*\) ->"),
    ("own_adapter:WrongPrediction", "WrongPrediction.prediction is 'score', expected velocity or epsilon"),
    ("own_adapter:OneTarget", "OneTarget.lora_targets is the string 'linear', expected a sequence of strings"),
    ("own_adapter:NotAMethod", r"NotAMethod.blocks is of type list, expected a method of \(module\)"),
]


@pytest.mark.parametrize(("spec", "says"), BROKEN, ids=[spec.partition(":")[2] or spec for spec, _ in BROKEN])
def test_a_broken_adapter_ends_in_one_line(spec: str, says: str, folder: Path) -> None:
    for load in (load_adapter, lambda spec: open_model(folder, adapter=spec)):
        refuses(says, load, spec)


def test_an_adapter_of_folders_is_reloaded_and_released(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.delattr(Toy, "with_weights")
    monkeypatch.delattr(Toy, "release")
    load_adapter("own_adapter:Toy")
    refuses("which is not a PipelineModel: it has no with_weights, release", open_model, folder, adapter=Toy)


@pytest.mark.parametrize("make", [lambda: Handwriting(None), Toy], ids=["built-in", "toy"])
def test_check_model_accepts_models_alone(make: Callable[[], DiffusionModel]) -> None:
    check_model(make(), "mine")
    refuses("mine is the class Toy, expected an object of it", check_model, Toy, "mine")
