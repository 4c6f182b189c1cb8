"""Start of a run: another run's adapter or export, or base weights from a folder; two commands from SFT to RL."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch, pipeline_runs, tiny_pipelines
from helpers.marks import long
from helpers.pipeline_runs import expect_on_policy, updates
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
from fluvial.engines.run.jobs.weights import find_base_model, from_run
from fluvial.models.lora import LoraConfig, add_lora, find_adapter_parameters
from fluvial.models.lora_files import read_lora
from fluvial.models.original.convert import to_original
from fluvial.models.original.layout import OriginalNames
from fluvial.models.pipelines.open import open_model

SIZE = pipeline_runs.size("sd3")


@pytest.fixture(scope="module")
def folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the tiny SD3 and the run of a supervised fine-tuning on images."""
    given = ["--lora.rank", 3, "--lora.alpha", 12, "--optimizer.lr", 0.05, "--out", home / "sft"]
    assert cli.run([*map(str, pipeline_runs.words(home, "sd3", "sft", "--data", home / "foxes", *given))]) == 0
    return home


@pytest.mark.long
def test_reinforcement_goes_on_from_the_adapter_of_a_supervised_run(
    folder: Path, tmp_path: Path, train: Any, fluvial: Any
) -> None:
    """On policy from the first step; rank and alpha are the file's; the reference is the adapter as it was given."""
    train("sd3", "grpo", "--lora", folder / "sft" / "lora", "--kl.coef", 0.1)
    first, second = updates(tmp_path / "run")
    assert first["first_pass_max_abs_log_ratio"] == 0.0
    assert first["objective"]["kl_ref"] == 0.0 < second["objective"]["kl_ref"]
    module = open_model(folder / "sd3", device="cpu").build(empty=True)
    before, after = (read_lora(run / "lora", module) for run in (folder / "sft", tmp_path / "run"))
    assert (after.rank, after.alpha) == (before.rank, before.alpha) == (3, 12)
    moved = [(after.tensors[name] - tensor).norm() / (tensor.norm() + 1e-9) for name, tensor in before.tensors.items()]
    assert 0 < max(moved) < 0.5
    fluvial("train", "grpo", "--out", tmp_path / "run", "--resume", "--updates", 3)


def test_a_run_is_a_model(folder: Path, tmp_path: Path, train: Any) -> None:
    """`--model runs/x` is that run's model with the weights that it exported; its record says so."""
    train("sd3", "grpo", "--model", folder / "sft")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["model"] == str(folder / "sd3")
    assert record["pipeline"]["weights"] == str(folder / "sft" / "weights")
    asked: dict[str, Any] = {"prompts": (str(folder / "prompts.txt"),), "rewards": ("jpeg",)}
    again = TrainConfig(tmp_path, Grpo(), model=str(folder / "sft"), pipeline=PipelineConfig(16, 16), **asked)
    assert find_base_model(again.model) == str(folder / "sd3")
    assert jobs.open_configured(again).model.weights == folder / "sft" / "weights"
    assert from_run(from_run(again)) == from_run(again)


def test_other_base_weights(folder: Path, tmp_path: Path) -> None:
    """`--transformer` names a folder as diffusers saves a network; the network that is built has its weights."""
    given = load_file(next((folder / "sft" / "weights").glob("*.safetensors")))
    weights, prompts = f"--transformer={folder / 'sft' / 'weights'}", str(folder / "prompts.txt")
    asked = launch.rewarded(*SIZE, "--model", str(folder / "sd3"), weights, "--prompts", prompts)
    config = parse_config(TrainConfig(tmp_path, method=Grpo()), "x", asked)
    built, base = (
        jobs.open_configured(config).model.build().state_dict(),
        open_model(folder / "sd3", device="cpu").build().state_dict(),
    )
    assert all(torch.equal(built[name], given[name]) for name in given)
    assert any(not torch.equal(built[name], base[name]) for name in given)
    config_of_network = open_model(folder / "sd3", device="cpu").config
    original = to_original(OriginalNames("StableDiffusion3Pipeline", config_of_network), given)
    save_file(original | {"first_stage_model.x": torch.zeros(1)}, tmp_path / "whole.safetensors")
    asked[asked.index(weights)] = f"--transformer={tmp_path / 'whole.safetensors'}"
    single = jobs.open_configured(parse_config(TrainConfig(tmp_path, method=Grpo()), "x", asked)).model.build().state_dict()
    assert all(torch.equal(single[name], given[name]) for name in given)


def test_what_does_not_fit_is_one_line(folder: Path, tmp_path: Path, train: Any, fluvial: Any) -> None:
    """It names the folder, the keys, or the setting; nothing is trained."""
    adapter, text, other, unet = folder / "sft" / "lora", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path
    tensors = load_file(adapter / LORA)
    save_file({f"text.{name}": tensor for name, tensor in tensors.items()}, text)
    cut = {name: tensor[:, :-1].contiguous() if ".lora_A." in name else tensor for name, tensor in tensors.items()}
    save_file(cut, other)
    (unet / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    for typed, says in (
        (("--lora", text), "match no linear layer of the SD3Transformer2DModel: text"),
        (("--lora", other), "is of another architecture: "),
        (("--lora", adapter, "--train", "full"), "--lora.weights has no effect with --train full"),
        (("--lora", adapter, "--lora.targets", "to_q"), "--lora.targets has no effect with lora.weights"),
        (("--transformer", unet), "holds a UNet2DConditionModel, expected a SD3Transformer2DModel"),
        (("--transformer", text), "is not a file of weights of StableDiffusion3Pipeline: it lacks "),
        (("--model", folder / "sft", "--transformer", unet), "is a run with its own"),
    ):
        assert says in train("sd3", "grpo", *typed, code=2)
    sheet = ["sample", folder / "sd3", *SIZE, "--steps", 2, "--each", 1, "--out", tmp_path / "sheet.png"]
    assert "match no linear layer of the SD3Transformer2DModel: text" in fluvial(*sheet, "--lora", text, code=2)
    assert not (tmp_path / "sheet.png").exists()


def test_preferences_are_drawn_with_the_policy_of_a_run(folder: Path, tmp_path: Path, fluvial: Any) -> None:
    """By its adapter or its exported weights, which draw the same images; the next command starts from them, too."""
    reward = ["--rewards", "helpers.tiny_token_job:brightness"]  # no ties, and the same order in spite of rounding
    given = ["--prompts", folder / "prompts.txt", *reward, "--group", 2, "--steps", 2, "--count", 1]
    words, drawn = ["preferences", folder / "sd3", *SIZE, *given], {}
    for name in ("base", "lora", "weights"):
        start = [] if name == "base" else [f"--{name}", str(folder / "sft" / name)]
        shown = fluvial(*words, *start, "--out", tmp_path / name)
        assert shown.split("preferences ")[-1].split()[1:] == start
        images = [Image.open(tmp_path / name / f"000000-{side}.png") for side in ("win", "lose")]
        drawn[name] = torch.stack([torch.tensor(list(image.tobytes())).float() for image in images])
    assert (drawn["lora"] - drawn["weights"]).abs().max() <= 1  # merged, to rounding
    assert (drawn["lora"] - drawn["base"]).abs().max() > 1
    assert "--lora: " in fluvial(*words, "--out", tmp_path / "other", "--lora", folder / "prompts.txt", code=2)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["wan-experts", long("sdxl")])
def test_two_experts_and_unets(name: str, home: Path, tmp_path: Path, train: Any) -> None:
    """They continue from an adapter, from other base weights and from a run, as pipelines of one transformer do."""
    model = tiny_pipelines.opened(name, pipeline_runs.save(home, name))
    module = model.build()
    with init_world() as world:
        written: dict[str, Any] = {"dtype": torch.float32, "world": world}
        add_lora(module, LoraConfig(rank=2, alpha=6.0), ("to_q",))
        for parameter in find_adapter_parameters(module, "default").values():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        write_lora(module, tmp_path / "lora", **written)
        export(module, tmp_path / "other", merge=True, **written)
    few = "--sampling.steps 2 --sampling.window random --sampling.window.size 1 --sampling.window.high 1"
    train(name, "ddpo" if name == "sdxl" else "grpo", *few.split(), "--lora", tmp_path / "lora")
    expect_on_policy(tmp_path / "run")
    begun, after = (read_lora(path / "lora", model.build(empty=True)) for path in (tmp_path, tmp_path / "run"))
    assert (after.rank, after.alpha, after.layers) == (begun.rank, begun.alpha, begun.layers) == (2, 6.0, begun.layers)

    def built(*typed: str) -> dict[str, torch.Tensor]:
        """Return the weights that a run with these flags starts from."""
        asked = ["--model", home / name, "--prompts", home / "prompts.txt", "--rewards", "jpeg", *pipeline_runs.size(name)]
        config = parse_config(TrainConfig(tmp_path, method=Grpo()), "x", [*map(str, asked), *typed])
        return jobs.open_configured(config).model.build().state_dict()

    base, other, run = built(), built("--transformer", str(tmp_path / "other")), built("--model", str(tmp_path / "run"))
    changed = [key for key in base if not torch.equal(base[key], other[key])]
    assert {key.removesuffix(".weight") for key in changed} == set(begun.layers)
    assert [key for key in base if not torch.equal(base[key], run[key])] == changed
    assert all((run[key] - other[key]).abs().max() < 2e-2 for key in changed)  # two updates away
