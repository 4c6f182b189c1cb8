"""Pipelines that learn from images: supervised on captions, and from preferences, through the command line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, tiny_pipelines, tiny_replayed
from helpers.marks import long
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.data.preferences import write_preferences
from fluvial.models.pipelines.base import Pipeline

FOXES = [f"{number} red foxes" for number in range(6)]
ROLLOUT = "--sampling.prompts 2 --micro-batch 2 --updates 2 --final-samples 2 --evaluation.every 0 --checkpoint.every 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines with an adapter and without, six images with captions, and six preferences."""
    folder = tmp_path_factory.mktemp("images")
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder / "sd3")
    tiny_pipelines.save(tiny_pipelines.ROWS["sdxl"], folder / "sdxl")
    tiny_replayed.load("aura-flow", folder / "aura-flow")
    pixels = torch.rand(12, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    write_preferences(folder / "prefs", [(FOXES[i], pixels[2 * i], pixels[2 * i + 1]) for i in range(6)])
    (folder / "foxes").mkdir()
    for number, caption in enumerate(FOXES):
        Image.effect_noise((24, 20), 50 + number).save(folder / "foxes" / f"{number}.png")
        (folder / "foxes" / f"{number}.txt").write_text(caption)
    return folder


def size(name: str) -> list[str]:
    """Return the flags that ask a pipeline for its images."""
    if name != "aura-flow":
        return ["--pipeline.height", "16", "--pipeline.width", "16", "--sampling.steps", "3"]
    call = dict(tiny_replayed.ROWS[name].options)
    height, width, scale = (str(call.pop(option)) for option in ("height", "width", "guidance_scale"))
    more = [f"{option}={json.dumps(value)}" for option, value in call.items()]
    sized = [
        "--pipeline.height",
        height,
        "--pipeline.width",
        width,
        "--sampling.guidance.scale",
        scale,
        "--sampling.steps",
        "3",
    ]
    return [*sized, "--noising.levels", "schedule", "--noising.each", "2", "--pipeline.call", *more]


def run(folder: Path, name: str, recipe: str, out: Path, *more: str) -> int:
    """Train a pipeline, two updates of a recipe, and return the exit code."""
    levels = ["--noising.levels", "schedule", "--noising.each", "2"] if name == "sdxl" else []
    return cli.run(
        ["train", recipe, "--model", str(folder / name), "--out", str(out), *ROLLOUT.split(), *size(name), *levels, *more]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("sdxl"), "aura-flow"])
def test_supervised_on_captions(
    folder: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and captions are encoded once, for the next run too; the weights move, and no text encoder is needed again."""
    encoded: list[int] = []
    encode = Pipeline.encode_with_vae

    def counted(self: Pipeline, images: Tensor, key: Any = None) -> Tensor:
        encoded.append(len(images))
        return encode(self, images, key)

    monkeypatch.setattr(Pipeline, "encode_with_vae", counted)
    given = ["--data", str(folder / "foxes"), "--data.cache", str(tmp_path / "cache")]
    assert run(folder, name, "sft", tmp_path / "one", *given) == 0, capfd.readouterr().err
    assert sum(encoded) == 5  # every tenth caption is held out
    updates = [record for record in launch.records(tmp_path / "one") if "grad_norm" in record]
    assert len(updates) == 2
    assert updates[0]["grad_norm"] > 0
    adapter = load_file(next((tmp_path / "one" / "lora").rglob("*.safetensors")))
    assert any(tensor.any() for key, tensor in adapter.items() if "lora_B" in key or ".up." in key)
    assert [*(tmp_path / "cache" / "texts").glob("*.safetensors")]
    encoded.clear()
    assert run(folder, name, "sft", tmp_path / "two", *given) == 0, capfd.readouterr().err
    assert not encoded
    again = [record for record in launch.records(tmp_path / "two") if "grad_norm" in record]
    assert [record["loss"] for record in again] == [record["loss"] for record in updates]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "aura-flow"])
def test_preferences_of_a_folder(folder: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The loss starts at log 2, with a weight of the rejected sample too."""
    given = ["--preferences", str(folder / "prefs"), "--lose-weight", "0.5", "--noising.each", "2"]
    assert run(folder, name, "dpo", tmp_path / "run", *given) == 0, capfd.readouterr().err
    updates = [record for record in launch.records(tmp_path / "run") if "grad_norm" in record]
    assert updates[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert updates[0]["grad_norm"] > 0
    assert len([*(tmp_path / "run" / "encoded").glob("*.safetensors")]) == 10


def test_an_image_that_cannot_be_read_is_skipped_where_asked(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else the run ends in one line that names it."""
    rows = [{"file_name": str(folder / "foxes" / f"{i}.png"), "text": FOXES[i]} for i in range(4)]
    (tmp_path / "broken.png").write_text("no image")
    rows[2]["file_name"] = str(tmp_path / "broken.png")
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--data", str(tmp_path / "some.jsonl")]
    assert run(folder, "sd3", "sft", tmp_path / "run", *given) == 2
    assert "broken.png cannot be read as an image" in launch.one_line(capfd.readouterr().err)
    assert run(folder, "sd3", "sft", tmp_path / "other", *given, "--data.errors", "skip") == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "more", "says"),
    [
        ("grpo", ["--data", "foxes"], "--data.images has no effect with grpo, which learns from rollouts"),
        (
            "sft",
            ["--data", "foxes", "--prompts", "x.txt"],
            "--prompts has no effect with data or preferences, which have their own",
        ),
        ("sft", ["--data.errors", "skip"], "--data.errors has no effect with sft here, which learns from no images"),
        ("sft", [], "for sft, set --data.images to a folder of images with captions"),
        ("sft", ["--data", "nowhere"], "data nowhere cannot be read: No such file or directory"),
        ("sft", ["--data", "foxes", "--data.cache", "foxes/0.png"], "--data.cache foxes/0.png cannot be used: "),
    ],
)
def test_what_has_no_meaning_is_one_line(
    folder: Path, recipe: str, more: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(folder, "sd3", recipe, folder / "wrong", *more) == 2
    assert says in launch.one_line(capfd.readouterr().err)


@pytest.mark.slow
def test_preferences_drawn_with_a_pipeline_train_it(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    asked = ["--prompts", str(tmp_path / "foxes.jsonl"), "--group", "3", "--steps", "2", "--rewards", "drawing:bright"]
    made = ["--pipeline.height", "16", "--pipeline.width", "16", "--out", str(pairs)]
    assert cli.run(["preferences", str(folder / "sd3"), *asked, *made]) == 0, capfd.readouterr().err
    told = " ".join(capfd.readouterr().out.split())
    assert "raised ValueError (no score) for prompt '4 red foxes'; 1 of the 5 prompts have no valid reward" in told
    assert "4 preferences of 5 prompts" in told
    lines = [json.loads(line) for line in (pairs / "preferences.jsonl").read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == [*FOXES[1:4], FOXES[5]]
    for line in lines:
        win, lose = (
            torch.tensor(list(Image.open(pairs / line[side]).convert("L").tobytes())).float().mean()
            for side in ("win", "lose")
        )
        sign = -1 if FOXES.index(line["prompt"]) % 2 else 1
        assert sign * win >= sign * lose
    given = ["--preferences", str(pairs), "--noising.each", "2"]
    assert run(folder, "sd3", "dpo", tmp_path / "run", *given) == 0, capfd.readouterr().err
    assert cli.run(["preferences", str(folder / "sd3"), *made]) == 2
    assert "needs prompts to train on: set --prompts" in launch.one_line(capfd.readouterr().err)
