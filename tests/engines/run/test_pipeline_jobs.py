"""Pipelines of diffusers, with an adapter and without, trained from their folders as a person would."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import launch, tiny_pipelines, tiny_replayed
from helpers.marks import long
from helpers.pipeline_runs import TWO_UPDATES, expect_on_policy, guidance, size, updates
from helpers.tiny_replayed import WITHOUT_ADAPTER
from PIL import Image
from safetensors.torch import load_file

from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import to_train
from fluvial.engines.run.jobs.evaluated import with_size_of
from fluvial.engines.run.jobs.settings import MachineConfig, PipelineConfig
from fluvial.engines.run.record import as_record
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.catalogue import KNOWN

PROMPTS = "a red fox\ntwo cats\nan owl\n9 owls in 1 barn\n"
SHORT = ("sd3", "sd1", "sana")  # on samples, too, in every run of the tests
# Like one of the others: text, layout and loss have tests of their own.
LONG = ("flux", "wan-experts", "sdxl", "z-image", "flux2", "lumina2", "aura-flow")
ROWS = {name: row for name, row in tiny_pipelines.ROWS.items() if not row.variant or name == "wan-experts"}
REWARD = "def bright(images, prompts):\n    return images.flatten(1).mean(1)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines with random weights, prompts, and a reward of one's own."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, row in ROWS.items():
        tiny_pipelines.save(row, folder / name)
    for name in WITHOUT_ADAPTER:
        tiny_replayed.load(name, folder / name)
    (folder / "prompts.txt").write_text(PROMPTS)
    (folder / "own_reward.py").write_text(REWARD)
    return folder


def flags(folder: Path, name: str, recipe: str, *more: str) -> list[str]:
    """Return the command line of two updates of the recipe, as small as it gets."""
    rollout = "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3"
    own = {
        "nft": ["--noising.each", "2"],
        "raft": ["--noising.each", "2"],
        "ddpo": ["--sampling.window", "random", "--sampling.window.size", "1", "--sampling.window.high", "2"],
    }.get(recipe, [])
    job = ["--model", str(folder / name), "--prompts", str(folder / "prompts.txt"), *size(name), *guidance(name)]
    texts = ["--pipeline.text-cache", str(folder / "texts")]
    return ["train", recipe, *job, *rollout.split(), *TWO_UPDATES, *texts, *own, *launch.rewarded(*more)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind) if (name not in LONG if kind == "on steps" else name in SHORT) else long(name, kind)
        for name, kind in product([*ROWS, *WITHOUT_ADAPTER], ("on steps", "on samples"))
    ],
)
def test_two_updates_of_each(folder: Path, tmp_path: Path, name: str, kind: str, fluvial: Any) -> None:
    """GRPO (DDPO for epsilon-prediction models) and NFT (RAFT): on policy to the bit, and the weights move."""
    epsilon = name in ROWS and ROWS[name].adapter.prediction == "epsilon"  # type: ignore[attr-defined]
    recipes = ("ddpo", "raft") if epsilon else ("grpo", "nft")
    fluvial(*flags(folder, name, recipes[kind == "on samples"]), "--out", tmp_path / "run")
    first, _ = updates(tmp_path / "run")
    assert first["grad_norm"] > 0
    assert kind != "on steps" or first["first_pass_max_abs_log_ratio"] == 0.0
    adapters = list((tmp_path / "run" / "lora").rglob("*.safetensors"))
    assert len(adapters) == (2 if name == "wan-experts" else 1)
    assert any(tensor.any() for key, tensor in load_file(adapters[0]).items() if "lora_B" in key or ".up." in key)
    assert list((tmp_path / "run" / "samples").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("sana"), long("flux2")])
def test_in_low_precision(folder: Path, tmp_path: Path, name: str, fluvial: Any) -> None:
    """Frozen parts and the network in bfloat16, as on a GPU: on policy to the bit, with an adapter and without."""
    low = ["--engine.compute", "bfloat16", "--pipeline.frozen", "bfloat16"]
    fluvial(*flags(folder, name, "grpo"), *low, "--out", tmp_path / "run")
    expect_on_policy(tmp_path / "run")


def test_a_reward_of_ones_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any) -> None:
    """`module:callable` with a weight, beside the built-in one; both are logged."""
    monkeypatch.syspath_prepend(str(folder))
    fluvial(*flags(folder, "sd3", "grpo", "--rewards", "jpeg", "own_reward:bright=2"), "--out", tmp_path / "run")
    record = next(record for record in launch.records(tmp_path / "run") if "rewards" in record)
    both = record["rewards"]["jpeg"] + 2 * record["rewards"]["own_reward:bright"]
    assert record["reward"]["mean"] == pytest.approx(both, rel=1e-4)


WRONG = [
    ("--pipeline.height 17", "expected multiples of"),
    ("--rewards nowhere:f", "there is no module 'nowhere'"),
    ("--rewards math:nothing", "math has no 'nothing'"),
    ("--rewards math:pi", "is of type float, expected a function"),
    ("--weights here", "there is no such folder, expected a network as diffusers saves one"),
    ("--sampling.sampler ddim --sampling.sampler.eta 1", "expected flow_sde or dance_sde or cps"),
]


def test_wrong_input_is_one_line(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """Before anything is computed; also what to learn from, and which file of text holds prompts, where it is not said."""
    for typed, says in WRONG:
        assert says in fluvial(*flags(folder, "sd3", "grpo", *typed.split()), "--out", tmp_path / "run", code=2), typed
    (tmp_path / "notes.md").write_text("# Notes\n")
    train, prompts = ["train", "grpo", "--model", folder / "sd3"], ["--prompts", folder / "prompts.txt"]
    asked = "comes without a reward to learn from: set --rewards, e.g. to pickscore, or to your own module:name"
    for words, says in (
        (train, "set --prompts to a file"),
        ([*train, *prompts], asked),
        (["preferences", folder / "sd3", *prompts, "--out", tmp_path / "prefs"], asked),
        ([*train, "--rewards", "jpeg", "--prompts", tmp_path / "notes.md"], "notes.md ends in .md, expected .txt, .jsonl"),
        (["train", "grpo", "--model", folder, *prompts, "--rewards", "jpeg"], "model_index.json"),
    ):
        assert says in fluvial(*words, code=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", long("wan-experts"), long("sana")])
def test_a_run_teaches_another(folder: Path, tmp_path: Path, name: str, fluvial: Any) -> None:
    """What a run exports, of one network or of several, is a teacher, whose walk the base model is drawn to."""
    once = ["--updates", 1, "--checkpoint.every", 1, "--export.dtype", "float32", "--optimizer.lr", 0.05]
    fluvial(*flags(folder, name, "grpo"), *once, "--out", tmp_path / "run")
    taught = ["--teacher", tmp_path / "run" / "weights", "--sampling.group", 1, "--optimizer.lr", 0.01, "--updates", 4]
    fluvial(*flags(folder, name, "distill"), *taught, "--out", tmp_path / "student")
    losses = [record["loss"] for record in launch.records(tmp_path / "student") if "loss" in record]
    assert losses[0] > 1e-9  # the teacher is not the base model
    none = fluvial(*flags(folder, name, "distill"), "--teacher", folder, "--sampling.group", 1, code=2)
    assert "config.json is missing" in none


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3", "wan-experts", "sana"])
def test_images_before_and_after(folder: Path, tmp_path: Path, name: str, fluvial: Any) -> None:
    """A run's adapter, drawn below the model without it; the two differ once the adapter is made larger."""
    fluvial(*flags(folder, name, "grpo"), "--optimizer.lr", 0.5, "--out", tmp_path / "run")
    sheet = tmp_path / "sheet.png"
    words = ["sample", folder / name, "--prompts", "a red fox", "--each", 1, "--steps", 3, "--out", sheet, *size(name)]
    fluvial(*words, "--lora", tmp_path / "run" / "lora")
    both = np.asarray(Image.open(sheet))
    fluvial(*words)
    alone = np.asarray(Image.open(sheet))
    assert both.shape[0] == 2 * alone.shape[0]
    assert (both[: len(alone)] == alone).all()
    assert (both[len(alone) + 40 :] != alone[40:]).any()
    assert "--lora" in fluvial(*words, "--lora", folder, code=2)


def test_the_models_are_listed(fluvial: Any) -> None:
    """Every pipeline that there is an adapter for."""
    text = fluvial("models")
    assert all(known.example in text for known in KNOWN)
    from_text = {known.pipeline for known in KNOWN if not known.makes.endswith(("from images", "of classes"))}
    assert from_text == {row.adapter.pipeline for row in ROWS.values()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["sd3", *map(long, ("wan-experts", WITHOUT_ADAPTER[0]))])
def test_a_job_in_python_says_the_size_of_the_run(folder: Path, tmp_path: Path, name: str) -> None:
    """The configuration has another one, the default; what is evaluated, sampled and exported later has the job's."""
    prompts = [str(folder / "prompts.txt")]
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
    job = to_train(str(folder / name), asked, steps=3, guidance=guided, prompts=prompts)
    found = with_size_of(job, PipelineConfig())
    assert (found.size, found.frames) == (asked.size, asked.frames)
    if name == "sd3":
        rollout = SamplingConfig(prompts=2, group=2, steps=3)
        run: dict[str, Any] = {"updates": 1, "rewards": ("jpeg",), "engine": MachineConfig(micro_batch=2)}
        config = TrainConfig(tmp_path / "run", Grpo(sampling=rollout), model=str(folder / name), **run)
        with Trainer(config, job) as trainer:
            assert as_record(trainer.config)["pipeline"]["width"] == width
        several = replace(asked, sizes=("32x16", "16x16"), height=512, width=512)
        job = to_train(str(folder / name), several, steps=3, guidance=guided, prompts=prompts)
        assert with_size_of(job, PipelineConfig()).sizes == several.sizes
        with pytest.raises(UsageError, match=r"job: shape is \[16, 9, 9\], expected that of one of its sizes"):
            with_size_of(replace(job, shape=(16, 9, 9)), PipelineConfig())
