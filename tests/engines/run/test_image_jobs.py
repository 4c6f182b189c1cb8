"""Pipelines that learn from images: supervised on captions, and from preferences, through the command line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_pipelines, tiny_replayed
from helpers.marks import long
from helpers.pipeline_runs import guidance, photos, size, updates
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fluvial.engines.data.preferences import write_preferences
from fluvial.models.pipelines.base import Pipeline

FOXES = [f"{number} red foxes" for number in range(6)]
ROLLOUT = "--sampling.prompts 2 --sampling.steps 3 --micro-batch 2 --updates 2 --final-samples 2 --evaluation.every 0"
ROLLOUT += " --checkpoint.every 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines with an adapter and without, six images with captions, and six preferences."""
    folder = tmp_path_factory.mktemp("images")
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder / "sd3")
    tiny_pipelines.save(tiny_pipelines.ROWS["sdxl"], folder / "sdxl")
    tiny_replayed.load("aura-flow", folder / "aura-flow")
    pixels = torch.rand(12, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    write_preferences(folder / "prefs", [(FOXES[i], pixels[2 * i], pixels[2 * i + 1]) for i in range(6)])
    photos(folder / "foxes", FOXES, (24, 20))
    return folder


LEVELS = ["--noising.levels", "schedule", "--noising.each", "2"]


@pytest.fixture
def run(folder: Path, fluvial: Any) -> Any:
    """Train a pipeline of the folder, two updates of a recipe; return what is printed, or the line of an error."""

    def train(name: str, recipe: str, out: Path, *more: object, code: int = 0) -> str:
        levels = [] if name == "sd3" else LEVELS
        words = ["--model", folder / name, "--out", out, *ROLLOUT.split(), *size(name), *guidance(name), *levels]
        said: str = fluvial("train", recipe, *words, *more, code=code)
        return said

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("sdxl"), "aura-flow"])
def test_supervised_on_captions(folder: Path, tmp_path: Path, name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and captions are encoded once, for the next run too; the weights move, and no text encoder is needed again."""
    encoded, encode = list[int](), Pipeline.encode_with_vae

    def counted(self: Pipeline, images: Tensor, key: Any = None) -> Tensor:
        encoded.append(len(images))
        return encode(self, images, key)

    monkeypatch.setattr(Pipeline, "encode_with_vae", counted)
    losses = []
    for out, count in ((tmp_path / "one", 5), (tmp_path / "two", 0)):  # every tenth caption is held out
        run(name, "sft", out, "--data", folder / "foxes", "--data.cache", tmp_path / "cache")
        assert sum(encoded) == count
        encoded.clear()
        losses.append([record["loss"] for record in updates(out)])
        assert updates(out)[0]["grad_norm"] > 0
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    adapter = load_file(next((tmp_path / "one" / "lora").rglob("*.safetensors")))
    assert any(tensor.any() for key, tensor in adapter.items() if "lora_B" in key or ".up." in key)
    assert [*(tmp_path / "cache" / "texts").glob("*.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "aura-flow"])
def test_preferences_of_a_folder(folder: Path, tmp_path: Path, name: str, run: Any) -> None:
    """The loss starts at log 2, with a weight of the rejected sample too."""
    given = ["--preferences", folder / "prefs", "--lose-weight", 0.5, "--noising.each", 2]
    run(name, "dpo", tmp_path / "run", *given)
    first = updates(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["grad_norm"] > 0
    assert len([*(tmp_path / "run" / "encoded").glob("*.safetensors")]) == 10


def test_an_image_that_cannot_be_read_is_skipped_where_asked(folder: Path, tmp_path: Path, run: Any) -> None:
    """Else the run ends in one line that names it."""
    rows = [{"file_name": str(folder / "foxes" / f"{i}.png"), "text": FOXES[i]} for i in range(4)]
    (tmp_path / "broken.png").write_text("no image")
    rows[2]["file_name"] = str(tmp_path / "broken.png")
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--data", tmp_path / "some.jsonl"]
    assert "broken.png cannot be read as an image" in run("sd3", "sft", tmp_path / "run", *given, code=2)
    run("sd3", "sft", tmp_path / "other", *given, "--data.errors", "skip")


def test_what_has_no_meaning_is_one_line(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for typed, says in (
        ("grpo --data foxes", "--data.images has no effect with grpo, which learns from rollouts"),
        ("sft --data foxes --prompts x.txt", "--prompts has no effect with data or preferences, which have their own"),
        ("sft --data.errors skip", "--data.errors has no effect with sft here, which learns from no images"),
        ("sft", "for sft, set --data.images to a folder of images with captions"),
        ("sft --data nowhere", "data nowhere cannot be read: No such file or directory"),
        ("sft --data foxes --data.cache foxes/0.png", "--data.cache foxes/0.png cannot be used: "),
    ):
        recipe, *more = typed.split()
        assert says in run("sd3", recipe, folder / "wrong", *more, code=2)


@pytest.mark.slow
def test_preferences_drawn_with_a_pipeline_train_it(
    folder: Path, tmp_path: Path, run: Any, fluvial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fluvial preferences` draws each prompt once, writes the best and the worst image, and names the command to go on."""
    (tmp_path / "drawing.py").write_text(
        "def bright(images, prompts, metadata, group, latents):\n"
        "    assert len(set(prompts)) == 1 and len(prompts) == len(latents) == 3\n"
        "    if prompts[0] == '4 red foxes':\n"
        "        raise ValueError('no score')\n"
        "    return [float(image.mean()) * record['sign'] for image, record in zip(images, metadata)]\n"
    )
    records = [{"prompt": caption, "sign": -1 if number % 2 else 1} for number, caption in enumerate(FOXES)]
    (tmp_path / "foxes.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.syspath_prepend(str(tmp_path))
    pairs = tmp_path / "pairs"
    asked = ["--prompts", tmp_path / "foxes.jsonl", "--group", 3, "--steps", 2, "--rewards", "drawing:bright"]
    made = ["preferences", folder / "sd3", "--pipeline.height", 16, "--pipeline.width", 16, "--out", pairs]
    told = " ".join(fluvial(*made, *asked).split())
    assert "raised ValueError (no score) for prompt '4 red foxes'; 1 of the 5 prompts have no valid reward" in told
    assert "4 preferences of 5 prompts" in told
    lines = [json.loads(line) for line in (pairs / "preferences.jsonl").read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == [*FOXES[1:4], FOXES[5]]
    for line in lines:
        win, lose = (np.asarray(Image.open(pairs / line[side]).convert("L")).mean() for side in ("win", "lose"))
        sign = -1 if FOXES.index(line["prompt"]) % 2 else 1
        assert sign * win >= sign * lose
    run("sd3", "dpo", tmp_path / "run", "--preferences", pairs, "--noising.each", 2)
    assert "needs prompts to train on: set --prompts" in fluvial(*made, code=2)
