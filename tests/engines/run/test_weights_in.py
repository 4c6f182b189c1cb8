"""Start of a run: another run's adapter or export, or base weights from a folder; two commands from SFT to RL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, tiny_pipelines
from helpers.marks import long
from PIL import Image
from safetensors.torch import load_file, save_file

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.parse import parse_config
from fluvial.engines.engine.world import init_world
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.files import LORA
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import base_model, from_run
from fluvial.models.lora import LoraConfig, adapter_parameters, add_lora
from fluvial.models.lora_files import read_lora
from fluvial.models.pipelines.open import open_model

SIZE = ["--pipeline.height", "16", "--pipeline.width", "16"]
SMALL = "--sampling.prompts 2 --sampling.steps 3 --micro-batch 2 --updates 2"
SMALL += " --passes.minibatches 1 --final-samples 2 --evaluation.every 0"
GRPO = ["--sampling.group", "2", "--kl.coef", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SD3, and the run of a supervised fine-tuning on three images."""
    folder = tmp_path_factory.mktemp("weights")
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder / "sd3")
    (folder / "foxes").mkdir()
    for number in range(3):
        Image.effect_noise((16, 16), 50 + number).save(folder / "foxes" / f"{number}.png")
        (folder / "foxes" / f"{number}.txt").write_text(f"{number} foxes")
    (folder / "prompts.txt").write_text("a red fox\ntwo cats\nan owl\n")
    given = ["--data", str(folder / "foxes"), "--lora.rank", "3", "--lora.alpha", "12", "--optimizer.lr", "0.05"]
    assert train(folder, "sft", "sd3", folder / "sft", *given) == 0
    return folder


def train(folder: Path, recipe: str, model: str, out: Path, *more: str) -> int:
    """Train a model of the folder, and return the exit code."""
    learnt = more if recipe == "sft" else launch.rewarded(*more)
    return cli.run(["train", recipe, "--model", str(folder / model), "--out", str(out), *SMALL.split(), *SIZE, *learnt])


@pytest.mark.long
def test_reinforcement_goes_on_from_the_adapter_of_a_supervised_run(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On policy from the first step; rank and alpha are the file's; the reference is the adapter as it was given."""
    given = ["--prompts", str(folder / "prompts.txt"), "--lora", str(folder / "sft" / "lora"), *GRPO]
    assert train(folder, "grpo", "sd3", tmp_path / "run", *given) == 0, capfd.readouterr().err
    first, second = (record for record in launch.records(tmp_path / "run") if "grad_norm" in record)
    assert first["first_pass_max_abs_log_ratio"] == 0.0
    assert first["objective"]["kl_ref"] == 0.0
    assert second["objective"]["kl_ref"] > 0
    module = open_model(folder / "sd3", device="cpu").build(empty=True)
    before, after = (read_lora(run / "lora", module) for run in (folder / "sft", tmp_path / "run"))
    assert (after.rank, after.alpha) == (before.rank, before.alpha) == (3, 12)
    moved = [(after.tensors[name] - tensor).norm() / (tensor.norm() + 1e-9) for name, tensor in before.tensors.items()]
    assert 0 < max(moved) < 0.5
    typed = ["--resume", "--updates", "3"]
    assert cli.run(["train", "grpo", "--out", str(tmp_path / "run"), *typed]) == 0, capfd.readouterr().err


def test_a_run_is_a_model(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--model runs/x` is that run's model with the weights that it exported; its record says so."""
    given = ["--prompts", str(folder / "prompts.txt"), "--sampling.group", "2"]
    assert train(folder, "grpo", "sft", tmp_path / "run", *given) == 0, capfd.readouterr().err
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["model"] == str(folder / "sd3")
    assert record["pipeline"]["weights"] == str(folder / "sft" / "weights")
    again = TrainConfig(
        tmp_path,
        model=str(folder / "sft"),
        prompts=(str(folder / "prompts.txt"),),
        rewards=("jpeg",),
        pipeline=PipelineConfig(16, 16),
        method=Grpo(),
    )
    assert base_model(again.model) == str(folder / "sd3")
    job = jobs.of_run(again)
    assert job.model.weights == folder / "sft" / "weights"
    assert from_run(from_run(again)) == from_run(again)


def test_other_base_weights(folder: Path, tmp_path: Path) -> None:
    """`--transformer` names a folder as diffusers saves a network; the network that is built has its weights."""
    file = next((folder / "sft" / "weights").glob("*.safetensors"))
    weights, prompts = f"--transformer={folder / 'sft' / 'weights'}", str(folder / "prompts.txt")
    asked = launch.rewarded(*SIZE, "--model", str(folder / "sd3"), weights, "--prompts", prompts)
    config = parse_config(TrainConfig(tmp_path, method=Grpo()), "x", asked)
    built = jobs.of_run(config).model.build().state_dict()
    base = open_model(folder / "sd3", device="cpu").build().state_dict()
    given = load_file(file)
    assert all(torch.equal(built[name], given[name]) for name in given)
    assert any(not torch.equal(built[name], base[name]) for name in given)


def test_what_does_not_fit_is_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It names the folder, the keys, or the setting; nothing is trained."""
    prompts = ["--prompts", str(folder / "prompts.txt"), "--sampling.group", "2"]
    adapter = folder / "sft" / "lora"
    tensors = load_file(adapter / LORA)
    save_file({f"text_encoder.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "text.safetensors")
    save_file(
        {name: tensor[:, :-1].contiguous() if ".lora_A." in name else tensor for name, tensor in tensors.items()},
        tmp_path / "other.safetensors",
    )
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    wrong = {
        ("sd3", "--lora", "nowhere"): "nowhere is neither a file nor a folder",
        ("sd3", "--lora", str(tmp_path / "text.safetensors")): "match no linear layer of the SD3Transformer2DModel: text",
        ("sd3", "--lora", str(tmp_path / "other.safetensors")): "is of another architecture: ",
        (
            "sd3",
            "--lora",
            str(adapter),
            "--train",
            "full",
        ): "--lora.weights has no effect with --train full, which has no adapter",
        ("sd3", "--lora", str(adapter), "--lora.targets", "to_q"): "--lora.targets has no effect with lora.weights",
        ("sd3", "--transformer", "nowhere"): "there is no such folder",
        ("sd3", "--transformer", str(tmp_path / "unet")): "holds a UNet2DConditionModel, expected a SD3Transformer2DModel",
        ("sft", "--transformer", str(tmp_path / "unet")): "is a run with its own; leave one out",
    }
    for (model, *typed), says in wrong.items():
        assert train(folder, "grpo", model, tmp_path / "run", *prompts, *typed) == 2
        assert says in launch.one_line(capfd.readouterr().err)
    sheet = ["sample", str(folder / "sd3"), *SIZE, "--steps", "2", "--each", "1", "--out", str(tmp_path / "sheet.png")]
    assert cli.run([*sheet, "--lora", str(tmp_path / "text.safetensors")]) == 2
    assert "match no linear layer of the SD3Transformer2DModel: text" in launch.one_line(capfd.readouterr().err)
    assert not (tmp_path / "sheet.png").exists()


def test_preferences_are_drawn_with_the_policy_of_a_run(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By its adapter or its exported weights, which draw the same images; the next command starts from them, too."""
    reward = ["--rewards", "helpers.tiny_token_job:brightness"]  # no ties, and the same order in spite of rounding
    given = ["--prompts", str(folder / "prompts.txt"), *reward, "--group", "2", "--steps", "2", "--count", "1"]
    drawn = {}
    for name, start in (
        ("base", []),
        ("lora", ["--lora", str(folder / "sft" / "lora")]),
        ("weights", ["--weights", str(folder / "sft" / "weights")]),
    ):
        words = ["preferences", str(folder / "sd3"), *SIZE, *given, *start, "--out", str(tmp_path / name)]
        assert cli.run(words) == 0, capfd.readouterr().err
        assert capfd.readouterr().out.split("preferences ")[-1].split()[1:] == start
        images = [Image.open(tmp_path / name / f"000000-{side}.png") for side in ("win", "lose")]
        drawn[name] = torch.stack([torch.tensor(list(image.tobytes())).float() for image in images])
    assert (drawn["lora"] - drawn["weights"]).abs().max() <= 1  # merged, to rounding
    assert (drawn["lora"] - drawn["base"]).abs().max() > 1
    assert cli.run([*words[:-1], str(tmp_path / "other"), "--lora", str(folder / "prompts.txt")]) == 2
    assert "--lora: " in launch.one_line(capfd.readouterr().err)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["wan-experts", long("sdxl")])
def test_two_experts_and_unets(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They continue from an adapter, from other base weights and from a run, as pipelines of one transformer do."""
    row = tiny_pipelines.ROWS[name]
    model = tiny_pipelines.opened(name, tiny_pipelines.save(row, tmp_path / "model"))
    (tmp_path / "prompts.txt").write_text("a red fox\ntwo cats\nan owl\n")
    module = model.build()
    with init_world() as world:
        written: dict[str, Any] = {"dtype": torch.float32, "world": world}
        add_lora(module, LoraConfig(rank=2, alpha=6.0), ("to_q",))
        for parameter in adapter_parameters(module, "default").values():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        write_lora(module, tmp_path / "lora", **written)
        export(module, tmp_path / "other", merge=True, **written)
    height, width, *frames = row.sizes[0]
    size = ["--pipeline.height", str(height), "--pipeline.width", str(width), "--pipeline.frames", str((*frames, 1)[0])]
    asked = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), *launch.rewarded(*size)]
    words = [
        "train",
        "ddpo" if name == "sdxl" else "grpo",
        *asked,
        *SMALL.split(),
        "--updates",
        "1",
        "--sampling.steps",
        "2",
    ]
    words += [
        "--sampling.group",
        "2",
        "--sampling.window",
        "random",
        "--sampling.window.size",
        "1",
        "--sampling.window.high",
        "1",
    ]
    started = [*words, "--lora", str(tmp_path / "lora"), "--out", str(tmp_path / "run")]
    assert cli.run(started) == 0, capfd.readouterr().err
    first = next(record for record in launch.records(tmp_path / "run") if "grad_norm" in record)
    assert first["first_pass_max_abs_log_ratio"] == 0.0
    begun = read_lora(tmp_path / "lora", model.build(empty=True))
    after = read_lora(tmp_path / "run" / "lora", model.build(empty=True))
    assert (after.rank, after.alpha, after.layers) == (begun.rank, begun.alpha, begun.layers) == (2, 6.0, begun.layers)

    def built(*typed: str) -> dict[str, torch.Tensor]:
        """Return the weights that a run with these flags starts from."""
        config = parse_config(TrainConfig(tmp_path, method=Grpo()), "x", [*asked, *typed])
        return jobs.of_run(config).model.build().state_dict()

    base, other, run = built(), built("--transformer", str(tmp_path / "other")), built("--model", str(tmp_path / "run"))
    changed = [key for key in base if not torch.equal(base[key], other[key])]
    assert {key.removesuffix(".weight") for key in changed} == set(begun.layers)
    assert [key for key in base if not torch.equal(base[key], run[key])] == changed
    assert all((run[key] - other[key]).abs().max() < 1e-2 for key in changed)  # an update away
