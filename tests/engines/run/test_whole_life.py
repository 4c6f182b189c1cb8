"""A project's whole life, for each pipeline: images, sft, its adapter, grpo from it, a crash, dpo, evaluation, exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import life_reward, tiny_pipelines, tiny_replayed
from helpers.pipeline_runs import TWO_UPDATES, guidance, photos, save, size, updates

from fluvial.engines.run.jobs.weights import make_converter
from fluvial.models.lora_files import read_lora
from fluvial.models.original.layout import LAYOUTS
from fluvial.models.pipelines.folder import silence

NAMES = ("sd3", "flux", "qwen-image", "wan", "z-image", "sdxl", "sana")
WITHOUT_ADAPTER = "sana"
SHORT = (WITHOUT_ADAPTER,)  # in every run of the tests; the others in `make test-all`
CAPTIONS = ("a red fox", "two cats", "an owl")
SHORTER = "--checkpoint.every 1 --sampling.steps 2"
OPTIMIZER = "--optimizer.lr 0.05 --optimizer.eps 1e-20"  # gradients of an adapter that has just begun are tiny
GRPO = "--sampling.prompts 2 --sampling.group 2 --sampling.window random --sampling.window.size 1 --sampling.window.high 1"


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Clear the notes of the reward."""
    for notes in (life_reward.SEEN, life_reward.FAILS_AT, life_reward.CALLS):
        notes.clear()


def levels(name: str) -> list[str]:
    """Return the flags of the noise levels of a model that knows only those of its schedule."""
    return ["--noising.levels", "schedule", "--noising.each", "2"] if name in ("sdxl", WITHOUT_ADAPTER) else []


def image(name: str, folder: Path, lora: Path | None = None) -> Any:
    """Return an image of a folder's pipeline, as diffusers draws it."""
    from diffusers import DiffusionPipeline

    with silence():
        pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        if lora is not None:
            pipeline.load_lora_weights(lora)
        row = tiny_pipelines.ROWS.get(name)
        if row is None:
            asked = {key: value for key, value in tiny_replayed.ROWS[name].options.items() if key != "guidance_scale"}
        else:
            asked = {"height": row.sizes[0][0], "width": row.sizes[0][1], **({"num_frames": 1} if name == "wan" else {})}
            if row.scheduler is not None:
                pipeline.scheduler = row.scheduler(pipeline.scheduler.config)
        seed = torch.Generator().manual_seed(0)
        made = pipeline("a red fox", num_inference_steps=2, generator=seed, output_type="np", **asked)
    return np.asarray(made[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_the_life_of_a_project(name: str, tmp_path: Path, fluvial: Any) -> None:
    """Each command starts from what the one before left; in the end diffusers draws what the run exported."""
    model = save(tmp_path, name)
    photos(tmp_path / "photos", CAPTIONS, (20, 16))
    flags = size(name, is_image=True)  # one frame of a video, as a photo is
    records = [{"prompt": caption, "count": number + 1} for number, caption in enumerate(CAPTIONS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))

    def train(recipe: str, out: str, *words: str, code: int = 0) -> str:
        given = ["--model", str(model), "--out", str(tmp_path / out), "--train", "lora", "--lora.rank", "2"]
        given += [*TWO_UPDATES, *SHORTER.split(), *OPTIMIZER.split(), *flags, *guidance(name)]
        said: str = fluvial("train", recipe, *given, *words, code=code)
        return said

    def start(run: str) -> list[str]:
        return ["--lora", str(tmp_path / run)]

    # Images are encoded once; a supervised run, whose adapter is exported from its last checkpoint.
    data = ["--data", str(tmp_path / "photos"), "--data.cache", str(tmp_path / "cache")]
    few = ["--lora.targets", "to_q", "to_v"] if name == "sdxl" else []  # of its hundred layers, for the time it takes
    train("sft", "sft", *data, "--lora.alpha", "4", *few)
    assert [*(tmp_path / "cache").rglob("*.safetensors")]
    fluvial("export", str(tmp_path / "sft"), "--as", "lora", "--out", str(tmp_path / "adapter"))

    # Reinforcement learning from it, with records that reach the reward; it crashes in its second update and goes on.
    recipe = "ddpo" if name == "sdxl" else "grpo"
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl")]
    rewards = ["--rewards", "helpers.life_reward:counted"]
    life_reward.FAILS_AT.extend(range(5, 50))  # after a trial, the evaluation before and two calls of the first rollout
    crashed = train(recipe, "rl", *prompts, *rewards, *GRPO.split(), *start("adapter"), "--export.every", "1", code=1)
    assert "out of paper" in crashed
    assert {record["count"] for record in life_reward.SEEN} <= {1, 2, 3}
    assert (tmp_path / "rl" / "exports" / "000001-lora" / "README.md").is_file()
    life_reward.FAILS_AT.clear()
    fluvial("train", recipe, "--out", str(tmp_path / "rl"), "--resume")
    assert [record["update"] for record in updates(tmp_path / "rl")] == [1, 2]

    # Preferences are drawn, and learnt from offline.
    drawn = ["--out", str(tmp_path / "pairs"), "--group", "2", "--steps", "2", "--micro-batch", "2", *flags]
    guided = ["--guidance.scale", "4.5"] if name == WITHOUT_ADAPTER else []
    fluvial(
        "preferences", str(model), *prompts, "--rewards", "helpers.life_reward:bright", *drawn, *guided, *start("rl/lora")
    )
    learnt = ["--preferences", str(tmp_path / "pairs"), "--sampling.prompts", "2"]
    train("dpo", "dpo", *learnt, "--beta", "20", "--noising.each", "2", *levels(name), *start("rl/lora"))

    # It is evaluated with guidance that it was not trained with.
    asked = ["--steps", "2", "--micro-batch", "2", "--guidance", "3", "--seeds", "1", "--out", str(tmp_path / "scores")]
    fluvial("eval", str(tmp_path / "dpo"), *prompts, "--rewards", "helpers.life_reward:bright", *asked)
    assert (tmp_path / "scores" / "table.json").is_file()

    # What is exported draws the same in diffusers: the whole pipeline, and the adapter in it.
    run = str(tmp_path / "dpo" / "checkpoints" / "000002")
    for kind in ("full", "lora"):
        fluvial("export", run, "--as", kind, "--out", str(tmp_path / kind))
    whole, base = image(name, tmp_path / "full"), image(name, model)
    assert np.abs(whole - base).max() > 1e-4
    if name != WITHOUT_ADAPTER:
        np.testing.assert_allclose(image(name, model, tmp_path / "lora"), whole, atol=1e-4)
    if name == WITHOUT_ADAPTER:
        assert "has no layout that ComfyUI reads" in fluvial("export", run, "--as", "comfyui", code=2)
        return
    fluvial("export", run, "--as", "comfyui", "--out", str(tmp_path / "comfyui"))
    network = tiny_pipelines.opened(name, model).build()
    kind = tiny_pipelines.ROWS[name].adapter.pipeline  # type: ignore[attr-defined]
    assert kind in LAYOUTS
    assert "| `lora.alpha` | `4.0` |" in (tmp_path / "lora" / "README.md").read_text()  # that of the adapter it began with
    ours = read_lora(tmp_path / "lora", network)
    theirs = read_lora(tmp_path / "comfyui", network, convert=make_converter(kind, network))
    assert (ours.rank, ours.alpha, ours.layers) == (theirs.rank, theirs.alpha, theirs.layers) == (2, 4, ours.layers)
    assert all(torch.equal(ours.tensors[key], theirs.tensors[key]) for key in ours.tensors)
