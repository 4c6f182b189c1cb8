"""Pipelines that learn from images and preferences, of one size and of several, through the command line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import launch, pipeline_runs
from helpers.marks import Patch, long
from helpers.pipeline_runs import updates
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fluvial.engines.run.sampler import RolloutSampler
from fluvial.models.pipelines.base import Pipeline

FOXES = [f"{number} red foxes" for number in range(6)]
SIZES = ("--pipeline.sizes", "16x16", "16x24", "--updates", "4", "--checkpoint.every", "4")


def sized(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's updates, the size as text."""
    return [{**record, "size": "{width}x{height}".format(**record["size"])} for record in updates(out)]


def on_two(home: Path, recipe: str, out: Path, *given: object) -> list[dict[str, Any]]:
    """Return the records of the updates of the same on two ranks."""
    words = map(str, pipeline_runs.words(home, "sd3", recipe, *given, *SIZES, "--out", out))
    done = launch.fluvial(*words, ranks=2)
    assert done.returncode == 0, done.stderr
    return sized(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("sdxl"), long("aura-flow")])
def test_supervised_on_captions(home: Path, tmp_path: Path, name: str, train: Any, monkeypatch: Patch) -> None:
    """Images and captions are encoded once, for the next run too; the weights move, and no text encoder is needed again."""
    encoded, encode = list[int](), Pipeline.encode_with_vae

    def counted(self: Pipeline, images: Tensor, key: Any = None) -> Tensor:
        encoded.append(len(images))
        return encode(self, images, key)

    monkeypatch.setattr(Pipeline, "encode_with_vae", counted)
    losses = []
    for out, count in (("one", 5), ("two", 0)):  # every tenth caption is held out
        train(name, "sft", "--data", home / "foxes", "--data.cache", tmp_path / "cache", out=out)
        assert sum(encoded) == count
        encoded.clear()
        losses.append([record["loss"] for record in updates(tmp_path / out)])
        assert updates(tmp_path / out)[0]["grad_norm"] > 0
    assert losses[0] == losses[1]
    adapter = load_file(next((tmp_path / "one" / "lora").rglob("*.safetensors")))
    assert any(tensor.any() for key, tensor in adapter.items() if "lora_B" in key or ".up." in key)
    assert [*(tmp_path / "cache" / "texts").glob("*.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [long("sd3"), "aura-flow"])
def test_preferences_of_a_folder(home: Path, tmp_path: Path, name: str, train: Any) -> None:
    """The loss starts at log 2, with a weight of the rejected sample too."""
    train(name, "dpo", "--preferences", home / "prefs", "--lose-weight", 0.5)
    first = updates(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["grad_norm"] > 0
    assert len([*(tmp_path / "run" / "encoded").glob("*.safetensors")]) == 10


def test_an_image_that_cannot_be_read_is_skipped_where_asked(home: Path, tmp_path: Path, train: Any) -> None:
    """Else the run ends in one line that names it."""
    rows = [{"file_name": str(home / "foxes" / f"{i}.png"), "text": FOXES[i]} for i in range(4)]
    (tmp_path / "broken.png").write_text("no image")
    rows[2]["file_name"] = str(tmp_path / "broken.png")
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--data", tmp_path / "some.jsonl"]
    assert "broken.png cannot be read as an image" in train("sd3", "sft", *given, code=2)
    train("sd3", "sft", *given, "--data.errors", "skip", out="other")


@pytest.mark.slow
def test_preferences_drawn_with_a_pipeline_train_it(
    home: Path, tmp_path: Path, train: Any, fluvial: Any, monkeypatch: Patch
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
    made = ["preferences", pipeline_runs.save(home, "sd3"), *pipeline_runs.size("sd3"), "--out", pairs]
    told = " ".join(fluvial(*made, *asked).split())
    assert "raised ValueError (no score) for prompt '4 red foxes'; 1 of the 5 prompts have no valid reward" in told
    assert "4 preferences of 5 prompts" in told
    lines = [json.loads(line) for line in (pairs / "preferences.jsonl").read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == [*FOXES[1:4], FOXES[5]]
    for line in lines:
        win, lose = (np.asarray(Image.open(pairs / line[side]).convert("L")).mean() for side in ("win", "lose"))
        sign = -1 if FOXES.index(line["prompt"]) % 2 else 1
        assert sign * win >= sign * lose
    train("sd3", "dpo", "--preferences", pairs)


def test_rollouts_have_the_size_of_their_prompts_or_one_that_is_drawn(
    home: Path, tmp_path: Path, train: Any, monkeypatch: Patch
) -> None:
    """On policy to the bit at each size, with a schedule that depends on it; rewards see images of that size."""
    (tmp_path / "measured.py").write_text(
        "seen = []\n"
        "def height(images, prompts, metadata):\n"
        "    if images.unique().numel() > 1:\n"  # not the blank images that a reward is tried on
        "        seen.append((images.shape[-2:], [record.get('size') for record in metadata]))\n"
        "    return images.flatten(1).mean(1)\n"
    )
    sampling, levels = RolloutSampler._make_sampling, dict[tuple[int, ...], list[float]]()

    def noted(self: RolloutSampler, root: Any, tokens: int | None, shape: tuple[int, ...], *rest: Any) -> Any:
        made = sampling(self, root, tokens, shape, *rest)
        levels[shape] = made.schedule.levels.tolist()
        return made

    monkeypatch.setattr(RolloutSampler, "_make_sampling", noted)
    monkeypatch.syspath_prepend(str(tmp_path))
    held = ["--pipeline.heldout", home / "heldout.txt"]
    train("flux", "grpo", "--prompts", home / "sized.jsonl", *held, "--rewards", "measured:height", *SIZES)
    import measured  # type: ignore[import-not-found]

    found = sized(tmp_path / "run")
    assert {record["size"] for record in found} == {"16x16", "16x24"}
    first, second = levels.values()
    assert first != second
    assert [record["first_pass_max_abs_log_ratio"] for record in found] == [0.0] * 4
    assert all(record["grad_norm"] > 0 for record in found)
    assert {tuple(shape) for shape, sizes in measured.seen if sizes[0] is not None} == {(24, 16)}
    assert all(len(set(sizes)) == 1 for _, sizes in measured.seen)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sft", "dpo", "raft"])
def test_images_of_several_sizes(home: Path, tmp_path: Path, recipe: str, train: Any) -> None:
    """Each update has one size on all ranks, and the FLOPs of its own; every image is encoded at its bucket.

    Both images of a pair are cut to one size, and RAFT fits the best of four images of a size, whatever their captions.
    """
    given = {
        "sft": ["--data", home / "two-sizes", "--noising.each", 2],
        "dpo": ["--preferences", home / "two-sized-prefs"],
        "raft": ["--data", home / "two-sizes", "--compare", "data", "--sampling.prompts", 1, "--sampling.group", 4],
    }[recipe]
    given += ["--pipeline.heldout", home / "heldout.txt"]
    train("sd3", recipe, *given, *SIZES)
    found = sized(tmp_path / "run")
    assert sorted({record["size"] for record in found}) == ["16x16", "16x24"]
    assert all(record["grad_norm"] > 0 for record in found)
    if recipe == "raft":
        assert all(record["pairs"] == 2 and record["reward"]["std"] > 0 for record in found)
        return
    assert len([*(tmp_path / "run" / "encoded").glob("*.safetensors")]) == {"sft": 6, "dpo": 8}[recipe]
    others = on_two(home, recipe, tmp_path / "two", *given)
    assert [other["size"] for other in others] == [record["size"] for record in found]
    assert sorted(record["size"] for record in found) == ["16x16"] * 2 + ["16x24"] * 2
    assert others[0]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert others[1]["loss"] == pytest.approx(found[1]["loss"], rel=1e-3)  # Adam makes rounding larger with each update
    if recipe == "dpo":
        assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
        return
    work: dict[str, set[int]] = {}
    for record in found:
        work.setdefault(record["size"], set()).add(round(record["speed"]["update_flops"] * record["seconds"]["update"]))
    assert max(work["16x16"]) < min(work["16x24"])
