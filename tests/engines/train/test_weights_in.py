"""What a run starts from: another run's adapter or export, or base weights from a folder; two commands from SFT to RL."""

import json
from pathlib import Path

import launch
import pytest
import tiny_pipelines
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.parse import parsed
from fluvial.engines.fsdp.files import LORA
from fluvial.engines.train import job as jobs
from fluvial.engines.train.config import PipelineConfig, TrainConfig
from fluvial.engines.train.jobs.weights import base_model, from_run
from fluvial.models.lora_files import read_lora
from fluvial.models.pipelines.open import open_model

SIZE = ["--pipeline.height", "16", "--pipeline.width", "16"]
SMALL = "--rollout.prompts 2 --rollout.steps 3 --micro-batch 2 --updates 2 --minibatches 1 --final-samples 2 --eval-every 0"
GRPO = ["--rollout.group", "2", "--kl.coef", "0.1"]


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
    return cli.run(["train", recipe, "--model", str(folder / model), "--out", str(out), *SMALL.split(), *SIZE, *more])


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
    given = ["--prompts", str(folder / "prompts.txt"), "--rollout.group", "2"]
    assert train(folder, "grpo", "sft", tmp_path / "run", *given) == 0, capfd.readouterr().err
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["model"] == str(folder / "sd3")
    assert record["weights"] == str(folder / "sft" / "weights")
    again = TrainConfig(
        tmp_path, model=str(folder / "sft"), prompts=(str(folder / "prompts.txt"),), pipeline=PipelineConfig(16, 16)
    )
    assert base_model(again.model) == str(folder / "sd3")
    job = jobs.of_run(again)
    assert job.model.weights == folder / "sft" / "weights"
    assert from_run(from_run(again)) == from_run(again)


def test_other_base_weights(folder: Path, tmp_path: Path) -> None:
    """`--transformer` names a folder as diffusers saves a network; the network that is built has its weights."""
    file = next((folder / "sft" / "weights").glob("*.safetensors"))
    config = parsed(
        TrainConfig, lambda: TrainConfig(tmp_path), "x",
        [*SIZE, "--model", str(folder / "sd3"), f"--transformer={folder / 'sft' / 'weights'}", "--prompts",
         str(folder / "prompts.txt")],
    )  # fmt: skip
    built = jobs.of_run(config).model.build().state_dict()
    base = open_model(folder / "sd3", device="cpu").build().state_dict()
    given = load_file(file)
    assert all(torch.equal(built[name], given[name]) for name in given)
    assert any(not torch.equal(built[name], base[name]) for name in given)


def test_what_does_not_fit_is_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It names the folder, the keys, or the setting; nothing is trained."""
    prompts = ["--prompts", str(folder / "prompts.txt"), "--rollout.group", "2"]
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
        (
            "sd3",
            "--lora",
            str(tmp_path / "text.safetensors"),
        ): "match no linear layer of the SD3Transformer2DModel: text",
        ("sd3", "--lora", str(tmp_path / "other.safetensors")): "is of another architecture: ",
        ("sd3", "--lora", str(adapter), "--train", "full"): "--lora.weights is set, and --train is full",
        ("sd3", "--lora", str(adapter), "--lora.targets", "to_q"): "--lora.targets is set, and --lora.weights has layers",
        ("sd3", "--transformer", "nowhere"): "and there is no such folder",
        ("sd3", "--transformer", str(tmp_path / "unet")): "holds a UNet2DConditionModel, expected a SD3Transformer2DModel",
        ("sft", "--transformer", str(tmp_path / "unet")): "is a run with its own: leave one out",
    }
    for (model, *typed), says in wrong.items():
        assert train(folder, "grpo", model, tmp_path / "run", *prompts, *typed) == 2
        assert says in launch.one_line(capfd.readouterr().err)
