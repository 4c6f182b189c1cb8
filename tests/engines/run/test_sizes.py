"""Runs with several sizes: images in aspect-ratio buckets, and rollouts whose size is named or drawn, through the CLI."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, tiny_pipelines, tiny_replayed
from helpers.pipeline_runs import photos, updates

from fluvial.engines.data.preferences import write_preferences
from fluvial.engines.run.sampler import RolloutSampler

SIZES = ["--pipeline.sizes", "16x16", "16x24"]
RUN = "--sampling.steps 3 --sampling.prompts 2 --micro-batch 2 --updates 4 --final-samples 2 --evaluation.every 0"
RUN += " --checkpoint.every 4"
FOXES = [f"{number} red foxes" for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines, six images with captions of two sizes, four preferences of two sizes, and prompts."""
    folder = tmp_path_factory.mktemp("sizes")
    for name in ("sd3", "flux"):
        tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name)
    photos(folder / "foxes", FOXES, (20, 30), (20, 20))
    pixels = [torch.rand(3, 20 if number < 4 else 30, 20) for number in range(8)]
    write_preferences(folder / "prefs", [(FOXES[i], pixels[2 * i], pixels[2 * i + 1]) for i in range(4)])
    sizes: list[dict[str, Any]] = [{"size": "16x24"}, {"width": 32, "height": 32}, {}] * 2
    rows = [{"prompt": caption, **size} for caption, size in zip(FOXES, sizes, strict=True)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "heldout.txt").write_text("a cow")
    photos(folder / "strips", ["a train"], (60, 20))
    return folder


@pytest.fixture
def run(folder: Path, fluvial: Any) -> Any:
    """Train a pipeline of the folder, four updates of a recipe; return what is printed, or the line of an error."""

    def train(name: str, recipe: str, out: Path, *more: object, code: int = 0) -> str:
        learnt = launch.rewarded(*map(str, more)) if recipe in ("grpo", "raft") else more
        held = ["--pipeline.heldout", folder / "heldout.txt"]
        said: str = fluvial("train", recipe, "--model", folder / name, "--out", out, *RUN.split(), *held, *learnt, code=code)
        return said

    return train


def on_two(folder: Path, recipe: str, out: Path, *given: str) -> list[dict[str, Any]]:
    """Return the records of the updates of the same on two ranks."""
    held = ["--pipeline.heldout", str(folder / "heldout.txt"), "--out", str(out)]
    done = launch.fluvial("train", recipe, "--model", str(folder / "sd3"), *RUN.split(), *held, *given, ranks=2)
    assert done.returncode == 0, done.stderr
    return sized(out)


def sized(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's updates, the size as text."""
    return [{**record, "size": "{width}x{height}".format(**record["size"])} for record in updates(out)]


def test_rollouts_have_the_size_of_their_prompts_or_one_that_is_drawn(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On policy to the bit at each size, with a schedule that depends on it; rewards see images of that size."""
    (tmp_path / "measured.py").write_text(
        "seen = []\n"
        "def height(images, prompts, metadata):\n"
        "    if images.unique().numel() > 1:\n"  # not the blank images that a reward is tried on
        "        seen.append((images.shape[-2:], [record.get('size') for record in metadata]))\n"
        "    return images.flatten(1).mean(1)\n"
    )
    given = ["--prompts", folder / "prompts.jsonl", "--rewards", "measured:height", "--sampling.group", 2]
    sampling, levels = RolloutSampler._sampling, dict[tuple[int, ...], list[float]]()

    def noted(self: RolloutSampler, root: Any, tokens: int | None, shape: tuple[int, ...], *rest: Any) -> Any:
        made = sampling(self, root, tokens, shape, *rest)
        levels[shape] = made.schedule.levels.tolist()
        return made

    monkeypatch.setattr(RolloutSampler, "_sampling", noted)
    monkeypatch.syspath_prepend(str(tmp_path))
    run("flux", "grpo", tmp_path / "run", *given, *SIZES, "--passes.minibatches", 1)
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
def test_supervised_on_images_of_several_sizes(folder: Path, tmp_path: Path, run: Any) -> None:
    """Each update has one size on all ranks, and the FLOPs of its own; every image is seen, and encoded at its bucket."""
    given = ["--data", str(folder / "foxes"), "--noising.each", "2", *SIZES]
    run("sd3", "sft", tmp_path / "run", *given)
    found = sized(tmp_path / "run")
    assert sorted(record["size"] for record in found) == ["16x16"] * 2 + ["16x24"] * 2
    assert all(record["grad_norm"] > 0 for record in found)
    work: dict[str, set[int]] = {}
    for record in found:
        work.setdefault(record["size"], set()).add(round(record["speed"]["update_flops"] * record["seconds"]["update"]))
    assert max(work["16x16"]) < min(work["16x24"])
    assert len([*(tmp_path / "run" / "encoded").glob("*.safetensors")]) == 6
    for record, other in zip(found, on_two(folder, "sft", tmp_path / "two", *given), strict=True):
        assert (other["size"], other["loss"]) == (record["size"], pytest.approx(record["loss"], rel=1e-5))


@pytest.mark.long
def test_preferences_of_several_sizes(folder: Path, tmp_path: Path, run: Any) -> None:
    """Both images of a pair are cut to one size; the loss starts at log 2, and two ranks share the pairs of an update."""
    given = ["--preferences", str(folder / "prefs"), "--noising.each", "2", *SIZES]
    run("sd3", "dpo", tmp_path / "run", *given)
    found, others = sized(tmp_path / "run"), on_two(folder, "dpo", tmp_path / "two", *given)
    assert sorted(record["size"] for record in found) == ["16x16"] * 2 + ["16x24"] * 2
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert [other["size"] for other in others] == [record["size"] for record in found]
    for record, other in zip(found[:2], others[:2], strict=True):  # Adam makes rounding larger with each update
        assert other["loss"] == pytest.approx(record["loss"], rel=1e-3)


@pytest.mark.long
def test_raft_on_the_best_images(folder: Path, tmp_path: Path, run: Any) -> None:
    """Compared with images of their size, whatever their captions; the best of four is fitted, at two levels."""
    given = ["--data", folder / "foxes", "--compare", "data", "--noising.each", 2, *SIZES]
    run("sd3", "raft", tmp_path / "run", *given, "--sampling.prompts", 1, "--sampling.group", 4)
    found = sized(tmp_path / "run")
    assert [record["pairs"] for record in found] == [2] * 4
    assert {record["size"] for record in found} == {"16x16", "16x24"}
    assert all(record["grad_norm"] > 0 and record["reward"]["std"] > 0 for record in found)


def test_what_has_no_meaning_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, fluvial: Any
) -> None:
    """It names the flag or the image."""
    monkeypatch.chdir(folder)
    for sizes, says in (
        ("16x16 16by9", "--pipeline.sizes has a wrong value: '16by9' is not a size, expected WIDTHxHEIGHT"),
        ("16x16 16x16", "--pipeline.sizes has a wrong value: 16x16 16x16 names a size twice"),
        ("16x16 --pipeline.width 16", "--pipeline.height and --pipeline.width have no effect with --pipeline.sizes"),
        ("16x16 17x16", "expected multiples of"),
        ("16x16 16x24 --data strips", "0.png of 60x20 pixels fit none of the sizes 16x16 16x24: more than a third"),
    ):
        line = run("sd3", "sft", tmp_path / "run", "--data", "foxes", "--pipeline.sizes", *sizes.split(), code=2)
        assert says in line
    for command in (("sample",), ("preferences", "--prompts", "foxes/0.txt")):
        line = fluvial(command[0], folder / "sd3", *SIZES, *command[1:], code=2)
        assert "expected one size: only training takes several" in line
    tiny_replayed.load("aura-flow", folder / "aura-flow")  # without an adapter
    (tmp_path / "prompts.txt").write_text("a fox")
    given = ["--prompts", tmp_path / "prompts.txt", "--pipeline.sizes", "16x16"]
    line = run("aura-flow", "grpo", tmp_path / "run", *given, code=2)
    assert "--pipeline.sizes has no effect without an adapter" in line
