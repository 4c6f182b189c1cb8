"""Lists that need no torch: recipes, installed ones too, and models."""

import inspect
import shlex
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from helpers import doors

from fluvial.engines.cli import listing
from fluvial.engines.cli import main as cli
from fluvial.engines.named_models import MODELS
from fluvial.models import check_model
from fluvial.models.pipelines.open import has_adapter, list_adapters


def test_recipes_are_listed_as_they_are() -> None:
    """Names, order and first lines, read from the source, are those of the functions."""
    from fluvial.engines.run.recipes import RECIPES

    def first_line(recipe: object) -> str:
        return (inspect.getdoc(recipe) or "").partition("\n")[0]

    assert listing.list_recipes() == {name: first_line(recipe) for name, recipe in RECIPES.items()}
    assert list(listing.list_recipes()) == list(RECIPES)
    assert all(listing.list_recipes().values())


@pytest.mark.parametrize("name", MODELS)
def test_a_name_of_a_model_stands_for_what_there_is(name: str) -> None:
    """Its class and its job can be imported; the job is one of that class."""
    entry = MODELS[name]
    assert callable(resolve_name(entry.job))
    check_model(resolve_name(entry.model)(), "model")


def test_installed_recipes_and_adapters_are_listed_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = "[fluvial.recipes]\nsharp = toypackage:sharp\n[fluvial.models]\nToyPipeline = toypackage:Toy\n"
    doors.install(tmp_path, "toypackage", "raise SystemError('imported')\n", entries)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(["train", "--help"]) == 0
    assert "\n  sharp        from toypackage (toypackage:sharp)\n" in capsys.readouterr().out
    assert cli.run(["models"]) == 0
    assert "ToyPipeline" in (shown := capsys.readouterr().out)
    assert "from toypackage (toypackage:Toy)" in shown
    assert "toypackage" not in sys.modules


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
@pytest.mark.parametrize("name", [*list_adapters(), "FluxKontextPipeline", "Flux3ModularPipeline"])
def test_a_tiny_pipeline_of_a_class_is_written_for_trying_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any
) -> None:
    """With every part that it needs, and the command that trains it, which is run for those of text alone."""
    monkeypatch.chdir(tmp_path)
    Path("classes.txt").write_text("1\nan owl\n")
    said, command = fluvial("models", "--tiny", name, "--out", "tiny").splitlines()
    assert (name in list_adapters()) == has_adapter(tmp_path / "tiny")
    assert "already exists" in fluvial("models", "--tiny", name, "--out", "tiny", code=2)
    if said.endswith(": none"):
        few = "--evaluation.every 0 --evaluation.samples 2 --evaluation.final-samples 2 --engine.micro-batch 2"
        assert "2 updates, 4 samples" in fluvial(*shlex.split(command)[1:], *few.split())


@pytest.mark.parametrize("typed", ["--tiny", "--tiny NoPipeline --out x", "--tiny FluxPipeline --to x"])
def test_what_has_no_tiny_pipeline_is_one_line(typed: str, fluvial: Any) -> None:
    assert "--tiny" in fluvial("models", *typed.split(), code=2)
