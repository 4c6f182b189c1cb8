"""`fluvial export`: any checkpoint of a run, in every format, opens in diffusers and computes what the run computed."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from helpers import handwriting_jobs, tiny_pipelines
from helpers.marks import long
from helpers.refusals import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.eval import EvalConfig
from fluvial.engines.cli.eval_models import apply_run_settings, open_networks
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.export import formats
from fluvial.engines.export.card import Card, write_card
from fluvial.engines.export.formats import COMFY_WEIGHTS
from fluvial.engines.files import LORA
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import train
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.config import PipelineConfig, TrainConfig, with_values
from fluvial.engines.run.exports import check_exports, export_run
from fluvial.engines.run.jobs.settings import ExportConfig
from fluvial.engines.run.jobs.weights import make_converter
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import Dora, Lokr, LoraConfig
from fluvial.models.lora_files import read_lora
from fluvial.models.quantised import find_quantised

PROMPTS = ("a red fox", "two cats")
SMALL_LORA = LoraConfig(rank=2, alpha=6.0)


def run_of(folder: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    """Train a tiny pipeline for two updates, with checkpoints; return the velocities of the policy and of its average."""
    row = tiny_pipelines.ROWS[name]
    if not (folder / name).exists():
        tiny_pipelines.save(row, folder / name)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "heldout.txt").write_text("an owl\n")
    height, width, frames, *_ = (*row.sizes[0], 1)
    asked: dict[str, Any] = {"heldout": (str(folder / "heldout.txt"),), "text_tokens": tiny_pipelines.TEXT}
    values: dict[str, Any] = {
        "model": str(folder / name),
        "prompts": (str(folder / "prompts.txt"),),
        "updates": 2,
        "pipeline": PipelineConfig(height, width, frames=frames, **asked),
        "train": "lora",
        "lora": SMALL_LORA,
        "engine.micro_batch": 2,
        "rewards": ("jpeg",),
        "checkpoint.keep": 5,
        "sampling": SamplingConfig(prompts=2, group=2, steps=3),
        "optimizer": OptimizerConfig(lr=0.1, ema_decay=0.5),
    }
    with Trainer(with_values(TrainConfig(folder / f"{name}-run", Grpo()), {**values, **changes})) as trainer:
        for _ in trainer:
            trainer.save()
        found = {}
        for kind in ("policy", "average"):
            with trainer.engine.inference(average=kind == "average") as module:
                found[kind] = velocity(trainer.job.model, module)
    return found


def velocity(model: Any, module: Any) -> Tensor:
    """Return the velocity of both prompts at a noise level."""
    x = tiny_pipelines.start(model, 2, (16, 16))
    with torch.no_grad():
        return model.predict(module, x, torch.tensor([0.7, 0.3]), model.encode(PROMPTS))


Ran = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A folder with a run of LoRA on a tiny SD3, and the velocities that it computed."""
    folder = tmp_path_factory.mktemp("exports")
    found = run_of(folder, "sd3")
    run = folder / "sd3-run"
    (run / "config.json").write_text(json.dumps(checkpoint.verify(run / "checkpoints" / "000002")["meta"]["run"]))
    records: list[dict[str, Any]] = [
        {"update": 0, "score": {"jpeg": 0.25}, "exact": {"jpeg": 0.0}},
        {"update": 1, "reward": {"mean": 0.25}, "loss": 0.5},
        {"update": 2, "reward": {"mean": 0.5}, "loss": 0.25},
        {"update": 2, "score": {"jpeg": 0.5}, "exact": {"jpeg": 0.0}},
        {"update": 3, "score": {"jpeg": 0.9}, "exact": {"jpeg": 0.0}},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"update": 3, "rew')  # is being written
    return folder, found


def exported(run: Path, out: Path, *typed: str) -> Path:
    """Export by the command line."""
    assert cli.run(["export", str(run), *typed, "--out", str(out)]) == 0
    return out


def expect_the_same_adapter(model: Any, plain: Any, lora: Path, comfy: Path) -> None:
    """The adapter in the original layout is that in diffusers'."""
    ours, converted = read_lora(lora, plain), read_lora(comfy, plain, convert=make_converter(model.pipeline, plain))
    assert (ours.rank, ours.alpha, ours.layers) == (converted.rank, converted.alpha, converted.layers)
    assert all(torch.equal(ours.tensors[name], converted.tensors[name]) for name in ours.tensors)


@pytest.mark.parametrize("ema", [False, True])
def test_every_format_computes_what_the_run_did(ran: Ran, tmp_path: Path, ema: bool) -> None:
    """The weights themselves, or their moving average; loaded by diffusers, and by the next run's --lora."""
    folder, found = ran
    run, expected, more = folder / "sd3-run", found["average" if ema else "policy"], ["--ema"] if ema else []
    model = tiny_pipelines.opened("sd3", folder / "sd3")
    kinds = ("lora", "merged", "full", "comfyui")
    lora, merged, full, comfy = (exported(run, tmp_path / kind, "--as", kind, *more) for kind in kinds)
    pipeline = DiffusionPipeline.from_pretrained(folder / "sd3", local_files_only=True)
    base = velocity(model, pipeline.transformer)
    assert (base - expected).abs().max() > 0.01
    pipeline.load_lora_weights(lora)
    for network in (
        pipeline.transformer,
        SD3Transformer2DModel.from_pretrained(merged, local_files_only=True),
        DiffusionPipeline.from_pretrained(full, local_files_only=True).transformer,
    ):
        torch.testing.assert_close(velocity(model, network), expected, rtol=1e-4, atol=1e-5)
    original = load_file(exported(run, tmp_path / "weights", "--as", "comfyui", "--merge", *more) / COMFY_WEIGHTS)
    back = convert_sd3_transformer_checkpoint_to_diffusers(original)
    for key, tensor in load_file(merged / "diffusion_pytorch_model.safetensors").items():
        assert torch.equal(back[key], tensor)
    expect_the_same_adapter(model, model.build(empty=True), lora, comfy)
    assert not (full / ".partial").exists()
    for kind, out in zip(kinds, (lora, merged, full, comfy), strict=True):
        card = (out / "README.md").read_text()
        assert ("moving average" in card) == ema
        assert str(folder) not in card
        assert json.loads((out / "fluvial.json").read_text())["format"] == kind


def test_an_earlier_checkpoint_and_the_newest_one(ran: Ran, tmp_path: Path) -> None:
    """A run stands for its newest checkpoint; each export says how many updates it has seen."""
    run = ran[0] / "sd3-run"
    newest = exported(run, tmp_path / "newest", "--dtype", "bfloat16")
    second = exported(run / "checkpoints" / "000002", tmp_path / "second")
    first = exported(run / "checkpoints" / "000001", tmp_path / "first")
    half, last, early = (load_file(path / "pytorch_lora_weights.safetensors") for path in (newest, second, first))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in last.items())
    assert any(not torch.equal(early[name], tensor) for name, tensor in last.items())
    assert "after 1 updates" in (first / "README.md").read_text()


def test_the_card_says_what_was_measured(ran: Ran, fluvial: Any) -> None:
    """Front matter, settings that differ, scores up to the update of the weights, the curve; in the default folder."""
    out = ran[0] / "sd3-run" / "exports" / "000002-lora"
    assert str(out) in fluvial("export", ran[0] / "sd3-run").replace("\n", "")
    card = (out / "README.md").read_text()
    front = card.split("---\n")[1]
    assert "library_name: diffusers\npipeline_tag: text-to-image\ntags:\n- fluvial" in front
    for absent in ("base_model", "license"):  # a folder is no id on the Hub
        assert absent not in front
    said = ("| `optimizer.lr` | `0.1` |", "| score, `jpeg` | 0.25 | 0.5 |", "(reward.png)")  # not the score of update 3
    assert all(text in card for text in (*said, 'pipeline.load_lora_weights("path/to/this/folder")'))
    for absent in ("sampling.sampler", "exactly right"):
        assert absent not in card
    assert (out / "reward.png").stat().st_size > 0
    shutil.rmtree(out)


def test_an_export_is_not_written_over(ran: Ran, tmp_path: Path, fluvial: Any) -> None:
    """The same export again changes nothing; another one, a damaged one and other files are refused."""
    run, out = ran[0] / "sd3-run", tmp_path / "out"
    exported(run, out)
    written = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert fluvial("export", run, "--as", "lora", "--out", out).startswith("exported before: ")
    assert written == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("notes")
    another = f"--out is {out}, which holds another export: name another folder"
    assert another in fluvial("export", run, "--as", "merged", "--out", out, code=2)
    assert another in fluvial("export", run, "--ema", "--out", out, code=2)
    assert "which holds other files" in fluvial("export", run, "--out", tmp_path / "notes", code=2)
    (out / "pytorch_lora_weights.safetensors").write_bytes(b"cut")
    assert another in fluvial("export", run, "--out", out, code=2)


def test_what_cannot_be_exported_is_one_line(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any
) -> None:
    """Nothing is left behind; 2 for what was asked, 1 for what happened."""
    folder, _ = ran
    run, empty, held = folder / "sd3-run", tmp_path / "empty", tmp_path / "checkpoints"
    empty.mkdir()
    shutil.copyfile(run / "config.json", empty / "config.json")
    (empty / "metrics.jsonl").write_text("")
    for name in ("000002", ".partial-000003"):
        shutil.copytree(run / "checkpoints" / "000002", held / name)
    (held / ".partial-000003" / "manifest.json").unlink()
    shard = next((held / "000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    out = ("--out", tmp_path / "out")
    for code, typed, says in (
        (2, (), "export needs a run or a checkpoint, got nothing"),
        (2, ("--as", "lora", *out), "export needs a run or a checkpoint, got '--as'"),
        (2, (tmp_path / "nowhere", *out), "nowhere is neither a run nor a checkpoint: there is no such folder"),
        (2, (folder / "sd3", *out), "is neither a run (config.json, metrics.jsonl) nor a checkpoint"),
        (2, (empty, *out), "is a run without a checkpoint"),
        (1, (held / "000002", *out), "is damaged ("),
        (1, (held / ".partial-000003", *out), "is damaged (manifest.json is missing)"),
        (2, (run, "--merge", *out), "--merge has no effect except with comfyui"),
        (2, (run, "--as", "onnx", *out), "--as"),
    ):
        assert says in fluvial("export", *typed, code=code)

    def full(*args: Any, **given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats.shutil, "copytree", full)
    partial = tmp_path / ".out.partial"
    assert f"export cannot be written to {partial}: the disk is full" in fluvial("export", run, "--as", "full", *out, code=1)
    assert not (tmp_path / "out").exists()
    assert not partial.exists()


def test_base_weights_that_changed_since(ran: Ran, tmp_path: Path) -> None:
    """They would be merged into weights that no run computed."""
    file = next((ran[0] / "sd3" / "transformer").glob("*.safetensors"))
    kept = file.read_bytes()
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    try:
        with init_world() as world, pytest.raises(RuntimeError, match="have changed since the run started"):
            export_run(ran[0] / "sd3-run", "merged", out=tmp_path / "out", world=world)
    finally:
        file.write_bytes(kept)


@pytest.mark.parametrize("name", ["wan-experts", long("sdxl")])
def test_two_experts_and_unets(tmp_path: Path, name: str) -> None:
    """A folder for each network; merged and from the original layout they compute the same."""
    sampler: Any = "ddim" if name == "sdxl" else "flow_sde"
    rollout = SamplingConfig(prompts=1, group=2, steps=2, sampler=Stochastic(sampler))
    expected = run_of(tmp_path, name, updates=1, sampling=rollout)["policy"]
    run = tmp_path / f"{name}-run" / "checkpoints" / "000001"
    model = tiny_pipelines.opened(name, tmp_path / name)
    full, lora, comfy = (exported(run, tmp_path / kind, "--as", kind) for kind in ("full", "lora", "comfyui"))
    opened = tiny_pipelines.opened(name, full)
    torch.testing.assert_close(velocity(model, opened.build()), expected, rtol=1e-4, atol=1e-5)
    expect_the_same_adapter(model, model.build(), lora, comfy)
    if name == "wan-experts":
        assert {path.name for path in lora.iterdir()} == {"transformer", "transformer_2", "README.md", "fluvial.json"}
        card = (lora / "README.md").read_text()
        assert "load_into_transformer_2=True" in card
        assert "text-to-video" in card


def test_a_run_of_all_weights(tmp_path: Path, fluvial: Any) -> None:
    """It has no adapter; its weights are those of the checkpoint, also in the original layout."""
    expected = run_of(tmp_path, "sd3", train="full", updates=1, optimizer=OptimizerConfig(lr=0.001))["policy"]
    run = tmp_path / "sd3-run" / "checkpoints" / "000001"
    model = tiny_pipelines.opened("sd3", tmp_path / "sd3")
    network = SD3Transformer2DModel.from_pretrained(exported(run, tmp_path / "merged"), local_files_only=True)
    assert torch.equal(velocity(model, network), expected)
    comfy = exported(run, tmp_path / "comfyui", "--as", "comfyui", "--dtype", "float16")
    assert {tensor.dtype for tensor in load_file(comfy / "diffusion_model.safetensors").values()} == {torch.float16}
    for typed, says in (
        ("--as lora", "there is no adapter to export as lora: use merged"),
        ("--ema", "--ema has no effect with checkpoint"),
        ("--as comfyui --merge", "--merge has no effect except with comfyui of a run with an adapter"),
    ):
        assert says in fluvial("export", run, *typed.split(), "--out", tmp_path / "out", code=2)


def test_formats_are_checked_before_training(tmp_path: Path) -> None:
    """A format that the run cannot have is an error before the first update, and not after hours."""
    for kind, says in (
        ("comfyui", "has no layout that ComfyUI reads, expected one of SD3, FLUX, Qwen-Image, Wan, Z-Image and SDXL"),
        ("full", "is not a pipeline with a folder"),
    ):
        with pytest.raises(ValueError, match=says):
            formats.check_format(kind, Handwriting(), adapted=True)  # type: ignore[arg-type]
    for kind, says in (("comfyui", ".* has no layout that ComfyUI reads"), ("lora", "the run trained all weights")):
        run = with_values(TrainConfig(tmp_path, method=Grpo()), {"export.format": kind, "export.every": 1})
        refuses(f"export.format is '{kind}': {says}", check_exports, run, Handwriting())
    check_exports(TrainConfig(tmp_path, method=Grpo(), export=ExportConfig(every=1)), Handwriting())


def test_the_card_of_a_model_of_the_hub(tmp_path: Path) -> None:
    """Its base model has an id and may have a licence; code loads the adapters of both networks."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\ntags: [video]\n---\n# Base\nlicense: none\n")
    lora = {"weights": "x/adapter", "form": {"kind": "lora"}}
    settings = {"train": "lora", "pipeline": {"weights": None}, "lora": lora, "optimizer": {"lr": 0.1, "eps": 1e-8}}
    card = Card(
        kind="lora",
        model="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        pipeline="WanPipeline",
        network="WanTransformer3DModel",
        parts=("transformer", "transformer_2"),
        video=True,
        folder=tmp_path / "base",
        method="mine:Loss",
        settings=settings,
        defaults={"optimizer": {"lr": 0.2, "eps": 1e-8}},
        update=40,
        average=True,
        dtype="bfloat16",
    )
    write_card(card, tmp_path, run=None)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(
        "---\nbase_model: Wan-AI/Wan2.2-T2V-A14B-Diffusers\nbase_model_relation: adapter\nlibrary_name: diffusers\n"
        "pipeline_tag: text-to-video\nlicense: apache-2.0\ntags:\n- fluvial\n- diffusers\n- Loss\n- lora\n---\n"
    )
    loads = 'load_lora_weights("path/to/this/folder/transformer_2", load_into_transformer_2=True)'
    for said in ("moving average", "started from an adapter", "| `optimizer.lr` | `0.1` |", loads):
        assert said in text
    for absent in ("x/adapter", "optimizer.eps", "Results"):  # nothing was measured
        assert absent not in text
    write_card(replace(card, settings={**settings, "lora": {**lora, "form": {"kind": "lokr"}}}), tmp_path, run=None)
    text = (tmp_path / "README.md").read_text()
    assert "The LoKr adapter of" in text
    assert 'pipeline.transformer_2.load_lora_adapter("path/to/this/folder/transformer_2", weight_name=' in text


@pytest.mark.long
@pytest.mark.parametrize("form", [Dora(), Lokr()], ids=str)
def test_an_adapter_of_a_run_is_continued_from_and_exported_again(tmp_path: Path, form: Any) -> None:
    """The file of a run begins another one, whose reference it is; the export of a checkpoint is that of the run."""
    config = handwriting_jobs.config(tmp_path / "first", train="lora", lora=LoraConfig(rank=4, form=form))
    train(config, handwriting_jobs.job())
    again = LoraConfig(weights=config.out / "lora")
    second = handwriting_jobs.config(tmp_path / "second", train="lora", lora=again, **{"engine.init": "whole"})
    train(second, handwriting_jobs.job())
    first, then = (load_file(run.out / "lora" / LORA) for run in (config, second))
    assert first.keys() == then.keys()
    assert any(not torch.equal(first[name], then[name]) for name in first)
    assert all((first[name] - then[name]).abs().max() < 0.1 for name in first)
    with init_world() as world:
        out, _ = export_run(config.out, "lora", out=tmp_path / "out", job=handwriting_jobs.job(), world=world)
    found = load_file(out / LORA)
    assert all(torch.allclose(found[name], first[name], atol=1e-6) for name in first)


@pytest.mark.long
def test_an_export_is_evaluated_as_it_is(tmp_path: Path) -> None:
    """Its weights are dequantised, and not rounded again; what the run started from is quantised as in the run."""
    config = handwriting_jobs.config(tmp_path / "run", train="lora", **{"engine.base": "int4"})
    train(config, handwriting_jobs.job())
    asked = apply_run_settings(str(config.out), EvalConfig(base="start"))
    with init_world() as world, ExitStack() as stack:
        subjects = open_networks(str(config.out), asked, world, stack)
        with subjects.ours.network() as module:
            assert not find_quantised(module)
        assert subjects.base is not None
        with subjects.base.network() as module:
            assert {layer.base for layer in find_quantised(module).values()} == {"int4"}
