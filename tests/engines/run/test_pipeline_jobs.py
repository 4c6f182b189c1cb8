"""Pipelines of diffusers, with an adapter and without, trained from their folders as a person would."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_servers, launch, pipeline_runs, tiny_pipelines, tiny_replayed, tiny_rewards
from helpers.marks import Patch, long
from helpers.pipeline_runs import expect_on_policy, size, updates
from helpers.refusals import refuses
from helpers.tiny_replayed import WITHOUT_ADAPTER
from PIL import Image
from safetensors.torch import load_file

from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import open_to_train
from fluvial.engines.run.jobs.evaluated import with_job_size
from fluvial.engines.run.jobs.settings import MachineConfig, PipelineConfig
from fluvial.engines.run.record import as_record
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.catalogue import KNOWN

ROWS = {name: row for name, row in tiny_pipelines.ROWS.items() if not row.variant or name == "wan-experts"}
# In every run of the tests: with an adapter and without, of velocities and of noise, of images and of videos.
SHORT = {("sd3", "on steps"), ("sd3", "on samples"), ("sd1", "on steps"), ("wan", "on steps"), ("sana", "on samples")}
LOW = ("--engine.compute", "bfloat16", "--pipeline.frozen", "bfloat16")  # frozen parts and the network, as on a GPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [row if row in SHORT else long(*row) for row in product([*ROWS, *WITHOUT_ADAPTER], ("on steps", "on samples"))]
    + [row if row[0] == "sd3" else long(*row) for row in product(("sd3", "sana", "flux2"), ("in bfloat16",))],
)
def test_two_updates_of_each(tmp_path: Path, name: str, kind: str, train: Any) -> None:
    """GRPO (DDPO for epsilon-prediction models) and NFT (RAFT): on policy to the bit, and the weights move."""
    epsilon = name in ROWS and ROWS[name].adapter.prediction == "epsilon"  # type: ignore[attr-defined]
    recipes = ("ddpo", "raft") if epsilon else ("grpo", "nft")
    train(name, recipes[kind == "on samples"], *(LOW if kind == "in bfloat16" else ()))
    if kind == "on samples":
        assert updates(tmp_path / "run")[0]["grad_norm"] > 0
    else:
        expect_on_policy(tmp_path / "run")
    adapters = list((tmp_path / "run" / "lora").rglob("*.safetensors"))
    assert len(adapters) == (2 if name == "wan-experts" else 1)
    assert any(tensor.any() for key, tensor in load_file(adapters[0]).items() if "lora_B" in key or ".up." in key)
    assert list((tmp_path / "run" / "samples").glob("*.png"))


def test_the_first_ratio_is_one_with_prompts_of_any_length(home: Path, tmp_path: Path, train: Any) -> None:
    """A fraction of the steps, drawn per sample, mixes other samples in a micro-batch of the update than in the rollout."""
    (tmp_path / "long.txt").write_text("a fox\ntwo cats\n" + "b " * 30 + "owls\n" + "nine owls\n")
    given = ["--prompts", tmp_path / "long.txt", "--pipeline.heldout", home / "heldout.txt", "--pipeline.text-tokens", 128]
    steps = "--sampling.prompts 4 --sampling.steps 4 --trained random --trained.fraction 0.5 --data.order epochs"
    train("qwen-image", "grpo", *given, *steps.split())
    expect_on_policy(tmp_path / "run")
    texts = [record["text"] for record in updates(tmp_path / "run")]
    assert [text["tokens"] for text in texts] == [64, 64]  # the long prompt is in every epoch of four
    assert texts[0]["saved"] == 0.5
    assert 0.3 < texts[0]["padding_waste"] < 0.9


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a reward server, a process of its own."""
    with launch.start("serve-rewards", "helpers.fake_servers:lightness", "--port", "0") as process:
        yield process.address()


KINDS = {
    "local model": ("pickscore:weights={clip},device=cpu",),
    "remote JSON": ("flow_factory:url={server}",),
    "remote JSON of UniRL": ("unirl:url={server},rewards=lightness",),
    "vlm": ("vlm_yes_no:url={vlm}",),
    "group-wise": ("helpers.fake_servers:ranked",),
    "weighted": ("jpeg", "helpers.fake_servers:lightness=2"),
    "constraint": ("helpers.fake_servers:lightness", "pickscore:weights={clip},device=cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_from_each_kind_of_reward(kind: str, server: str, tmp_path: Path, train: Any) -> None:
    """Its rewards differ between samples, and the adapter moves; nothing is left out."""
    tiny_rewards.save_clip(tmp_path / "clip")
    floor = ["--advantage.floors", "pickscore=10"] if kind == "constraint" else []
    with fake_servers.loopback(fake_servers.YesNo()) as vlm:
        rewards = [text.format(clip=tmp_path / "clip", server=server, vlm=vlm) for text in KINDS[kind]]
        few = "--sampling.steps 2 --sampling.window all --sampling.window.high 1 --lora.rank 2"
        train("sd3", "grpo", *few.split(), "--rewards", *rewards, *floor)
    first, second = updates(tmp_path / "run")
    for record in (first, second):
        assert record["reward"]["std"] > 0 < record["grad_norm"]
        assert record["invalid"] == {"samples": 0, "groups": 0}
    if floor:
        assert 0 < first["multipliers"]["pickscore"] < second["multipliers"]["pickscore"]
    if kind == "weighted":
        both = first["rewards"]["jpeg"] + 2 * first["rewards"]["helpers.fake_servers:lightness"]
        assert first["reward"]["mean"] == pytest.approx(both, rel=1e-4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 2


# Command lines in the folder of `home`, and the flag or the words that their one line names.
WRONG: list[tuple[str, str]] = [
    ("grpo sd3 --pipeline.height 17", "expected multiples of"),
    ("grpo sd3 --rewards nowhere:f", "there is no module 'nowhere'"),
    ("grpo sd3 --weights here", "there is no such folder"),
    ("grpo sd3 --sampling.sampler ddim --sampling.sampler.eta 1", "expected flow_sde or dance_sde or cps"),
    ("distill sd3 --teacher .", "config.json is missing"),
    ("grpo sd3 --data foxes", "--data.images has no effect with grpo"),
    ("sft sd3 --data foxes --prompts x.txt", "--prompts has no effect with data or preferences"),
    ("sft sd3 --data.errors skip", "--data.errors has no effect with sft here"),
    ("sft sd3", "set --data.images"),
    ("sft sd3 --data nowhere", "data nowhere cannot be read"),
    ("sft sd3 --data foxes --data.cache foxes/0.png", "--data.cache foxes/0.png cannot be used: "),
    # Sizes
    ("sft sd3 --data foxes --pipeline.sizes 16x16 16by9", "--pipeline.sizes has a wrong value: '16by9'"),
    ("sft sd3 --data foxes --pipeline.sizes 16x16 16x16", "names a size twice"),
    (
        "sft sd3 --data foxes --pipeline.sizes 16x16 --pipeline.width 32",
        "--pipeline.width have no effect with --pipeline.sizes",
    ),
    ("sft sd3 --data strips --pipeline.sizes 16x16 16x24", "0.png of 60x20 pixels fit none of the sizes 16x16 16x24"),
    ("grpo aura-flow --pipeline.sizes 16x16", "--pipeline.sizes has no effect without an adapter"),
    # Weights
    ("grpo sd3 --lora nowhere", "nowhere is neither a file nor a folder"),
    ("grpo sd3 --transformer nowhere", "there is no such folder"),
]
# The same with whole commands.
COMMANDS: list[tuple[str, str]] = [
    ("train grpo --model sd3", "set --prompts to a file"),
    ("train grpo --model sd3 --prompts prompts.txt", "set --rewards"),
    ("preferences sd3 --prompts prompts.txt --out prefs", "set --rewards"),
    ("preferences sd3 --out prefs", "set --prompts"),
    ("train grpo --model sd3 --rewards jpeg --prompts notes.md", "notes.md ends in .md, expected .txt, .jsonl"),
    ("train grpo --model . --prompts prompts.txt --rewards jpeg", "model_index.json"),
    ("sample sd3 --pipeline.sizes 16x16 16x24", "expected one size"),
    ("preferences sd3 --pipeline.sizes 16x16 16x24 --prompts prompts.txt", "expected one size"),
]


def test_wrong_input_is_one_line(home: Path, monkeypatch: Patch, train: Any, fluvial: Any) -> None:
    """It names the flag, the file or the image; nothing is computed."""
    monkeypatch.chdir(home)
    for line, says in WRONG:
        recipe, name, *typed = line.split()
        assert says in train(name, recipe, *typed, code=2), line
    for line, says in COMMANDS:
        assert says in fluvial(*line.split(), code=2), line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("wan-experts"), long("sana")])
def test_a_run_teaches_another(tmp_path: Path, name: str, train: Any) -> None:
    """What a run exports, of one network or of several, is a teacher, whose walk the base model is drawn to."""
    train(name, "grpo", "--export.dtype", "float32", "--optimizer.lr", 0.05)
    taught = ["--teacher", tmp_path / "run" / "weights", "--optimizer.lr", 0.01]
    train(name, "distill", *taught, out="student")
    assert updates(tmp_path / "student")[0]["loss"] > 1e-9  # the teacher is not the base model


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3", "wan-experts", "sana"])
def test_images_before_and_after(home: Path, tmp_path: Path, name: str, train: Any, fluvial: Any) -> None:
    """A run's adapter, drawn below the model without it; the two differ once the adapter is made larger."""
    train(name, "grpo", "--optimizer.lr", 0.5)
    sheet = tmp_path / "sheet.png"
    words = ["sample", home / name, "--prompts", "a red fox", "--each", 1, "--steps", 3, "--out", sheet, *size(name)]
    fluvial(*words, "--lora", tmp_path / "run" / "lora")
    both = np.asarray(Image.open(sheet))
    fluvial(*words)
    alone = np.asarray(Image.open(sheet))
    assert both.shape[0] == 2 * alone.shape[0]
    assert (both[: len(alone)] == alone).all()
    assert (both[len(alone) + 40 :] != alone[40:]).any()
    assert "--lora" in fluvial(*words, "--lora", home, code=2)


def test_the_models_are_listed(fluvial: Any) -> None:
    """Every pipeline that there is an adapter for."""
    text = fluvial("models")
    assert all(known.example in text for known in KNOWN)
    from_text = {known.pipeline for known in KNOWN if not known.makes.endswith(("from images", "of classes"))}
    assert from_text == {row.adapter.pipeline for row in ROWS.values()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["sd3", *map(long, ("wan-experts", WITHOUT_ADAPTER[0]))])
def test_a_job_in_python_says_the_size_of_the_run(home: Path, tmp_path: Path, name: str) -> None:
    """The configuration has another one, the default; what is evaluated, sampled and exported later has the job's."""
    prompts, model = [str(home / "prompts.txt")], str(pipeline_runs.save(home, name))
    if name in ROWS:
        height, width, *frames = ROWS[name].sizes[0]
        asked = PipelineConfig(height=height, width=width, frames=frames[0] if frames else 1)
    else:
        options = {**tiny_replayed.ROWS[name].options}
        height, width = (options.pop(option) for option in ("height", "width"))
        options.pop("guidance_scale")
        call = tuple(f"{option}={json.dumps(value)}" for option, value in options.items())
        asked = PipelineConfig(height=height, width=width, call=call)
    guided = Guidance() if name in ROWS else Guidance(tiny_replayed.ROWS[name].options["guidance_scale"])
    job = open_to_train(model, asked, steps=3, guidance=guided, prompts=prompts)
    found = with_job_size(job, PipelineConfig())
    assert (found.size, found.frames) == (asked.size, asked.frames)
    if name == "sd3":
        rollout = SamplingConfig(prompts=2, group=2, steps=3)
        run: dict[str, Any] = {"updates": 1, "rewards": ("jpeg",), "engine": MachineConfig(micro_batch=2)}
        with Trainer(TrainConfig(tmp_path / "run", Grpo(sampling=rollout), model=model, **run), job) as trainer:
            assert as_record(trainer.config)["pipeline"]["width"] == width
        several = replace(asked, sizes=("32x16", "16x16"), height=512, width=512)
        job = open_to_train(model, several, steps=3, guidance=guided, prompts=prompts)
        assert with_job_size(job, PipelineConfig()).sizes == several.sizes
        refuses("shape is", with_job_size, replace(job, shape=(16, 9, 9)), PipelineConfig())
