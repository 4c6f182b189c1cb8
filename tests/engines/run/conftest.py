"""Fixtures of the tests of runs: numbers of threads, and tiny pipelines with what they learn from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import pipeline_runs

from fluvial.engines.data.preferences import write_preferences

FOXES = [f"{number} red foxes" for number in range(6)]


@pytest.fixture(params=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads, restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A person's folder with prompts, images with captions and preferences, each of one size and of two."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "prompts.txt").write_text("a red fox\ntwo cats\nan owl\n9 owls in 1 barn\n")
    (folder / "heldout.txt").write_text("a cow\n")
    (folder / "notes.md").write_text("# Notes\n")
    pipeline_runs.photos(folder / "foxes", FOXES, (24, 20))
    pipeline_runs.photos(folder / "two-sizes", FOXES, (20, 30), (20, 20))
    pipeline_runs.photos(folder / "strips", ["a train"], (60, 20))
    pixels = torch.rand(12, 3, 30, 20, generator=torch.Generator().manual_seed(0))
    square = pixels[:, :, :20]
    write_preferences(folder / "prefs", [(FOXES[i], square[2 * i], square[2 * i + 1]) for i in range(6)])
    heights = [20, 20, 20, 20, 30, 30, 30, 30]
    pairs = [pixels[number, :, :height] for number, height in enumerate(heights)]
    write_preferences(folder / "two-sized-prefs", [(FOXES[i], pairs[2 * i], pairs[2 * i + 1]) for i in range(4)])
    sizes: list[dict[str, Any]] = [{"size": "16x24"}, {"width": 32, "height": 32}, {}] * 2
    rows = [{"prompt": caption, **size} for caption, size in zip(FOXES, sizes, strict=True)]
    (folder / "sized.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def train(home: Path, tmp_path: Path, fluvial: Any) -> Any:
    """Train a tiny pipeline by a recipe, two updates to the folder `run`; return what is printed, or the error's line."""

    def run(name: str, recipe: str, *more: object, out: str = "run", code: int = 0) -> str:
        said: str = fluvial(*pipeline_runs.words(home, name, recipe, *more), "--out", tmp_path / out, code=code)
        return said

    return run
