"""Dry runs of every recipe and adapter, on 1 and 8 ranks: nothing fails, and what fluvial promises holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
from dry_runs import check, gathers
from rich.console import Console

from fluvial.engines.cli.main import run as command_line
from fluvial.engines.dryrun.report import Report, draw
from fluvial.engines.dryrun.run import dry_run
from fluvial.engines.simulate.device import GIB, Accelerator
from fluvial.engines.train.config import AsyncConfig, PipelineConfig, TrainConfig
from fluvial.engines.train.recipes import RECIPES
from fluvial.models.handwriting import BASE

pytestmark = pytest.mark.simulated
UNITS = {"handwriting": 5, "handwriting-unet": 7, "words": 5}
SPECIAL = {"sft", "dpo", "distill"}


def recipe(name: str) -> TrainConfig:
    """Return the run of a recipe for its built-in model."""
    return RECIPES[name](teacher=BASE) if name == "distill" else RECIPES[name]()


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs(name: str, ranks: int) -> None:
    """With one read-back per update and no read in the rollout."""
    check(dry_run(recipe(name), ranks=ranks))


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", [name for name, row in tiny_pipelines.ROWS.items() if not row.variant])
def test_every_adapter_runs(name: str, ranks: int, tmp_path: Path) -> None:
    """Its text encoders, network and VAE, from their settings."""
    folder = tiny_pipelines.save(tiny_pipelines.ROWS[name], tmp_path / name)
    height, width, *frames = tiny_pipelines.ROWS[name].sizes[0]
    config = RECIPES["ddpo" if name in ("sd1", "sdxl") else "grpo"](str(folder))
    pipeline = PipelineConfig(height=height, width=width, frames=(*frames, 1)[0], text_cache=tmp_path / "texts")
    report = dry_run(replace(config, train="lora", micro_batch=2, update_micro_batch=None, pipeline=pipeline), ranks=ranks)
    check(report)
    assert report.phase("decode").operations > 0
    assert report.phase("rollout").flops > 0


ENGINES: dict[str, dict[str, Any]] = {
    "reshard": {"comm": "reshard"},
    "block": {"checkpointing": "block"},
    "phases": {"offload": "phases"},
    "always": {"offload": "always"},
    "context": {"context_parallel": 2},
    "hybrid": {"replicas": 2},
    "every": {"grad_sync": "every"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_setting_of_the_engine_runs(name: str) -> None:
    """On 8 ranks."""
    config = RECIPES["grpo"]()
    report = dry_run(replace(config, engine=replace(config.engine, **ENGINES[name])), ranks=8)
    assert report.error is None
    assert report.fits
    if name == "phases":  # the optimizer's state is on the host during the rollout
        assert report.phase("rollout").before < report.phase("update").before or report.phase("rollout").peak > 0


def test_rollouts_ahead_of_the_updates_run_beside_them() -> None:
    """Their thread is simulated too, and their peak is added to the update's."""
    config = replace(RECIPES["nft"](), asynchronous=AsyncConfig(ahead=1))
    alone, ahead = dry_run(RECIPES["nft"](), ranks=2), dry_run(config, ranks=2)
    assert ahead.error is None
    assert ahead.concurrent > 0
    assert ahead.peak > alone.peak
    assert ahead.phase("rollout").flops > 0


def test_gathers_of_an_update_are_those_promised() -> None:
    """One per block and one for the rest, on 8 ranks, with two micro-batches as with one."""
    config = replace(RECIPES["grpo"](), update_micro_batch=8)
    config = replace(config, engine=replace(config.engine, replicas=1, compute="bfloat16"))  # sharded by FSDP2
    report = dry_run(config, ranks=8)
    assert report.micro_batches > 1
    check(report, units=UNITS["handwriting"])
    resharded = dry_run(replace(config, engine=replace(config.engine, comm="reshard")), ranks=8)
    assert gathers(resharded.phase("update")) > 2 * UNITS["handwriting"]


def test_a_report_is_a_table_json_and_an_image(tmp_path: Path) -> None:
    """Each with every phase, and with what is not simulated."""
    report = dry_run(RECIPES["grpo"](), ranks=8)
    names = ["build", "rollout", "decode", "rewards", "update", "evaluation", "checkpoint"]
    assert [phase.name for phase in report.phases] == names
    console = Console(width=200, record=True, file=(tmp_path / "console").open("w"))
    report.show(console)
    text = console.export_text()
    assert all(name in text for name in (*names, "Not simulated", "NCCL", "overlap", "kernels", "allocator"))
    record = json.loads(json.dumps(report.record()))
    assert set(record["phases"]) == set(names)
    assert record["checkpoint"]["bytes_of_rank"] < record["checkpoint"]["bytes"]
    draw(report, tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()


def test_samples_that_are_not_made_are_added(tmp_path: Path) -> None:
    """A run of ten times as many samples holds ten times as many trajectories."""
    config = RECIPES["grpo"]()
    few = replace(config, micro_batch=4, update_micro_batch=None, rollout=replace(config.rollout, prompts=2, group=4))
    many = replace(few, rollout=replace(few.rollout, prompts=20))
    reports = [dry_run(each) for each in (few, many)]
    stored = [report.phase("update").stored for report in reports]
    assert stored[0] == 0
    assert stored[1] > 0
    assert reports[1].micro_batches == pytest.approx(10 * reports[0].micro_batches, rel=0.5)


def test_the_command_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 where it does not; the report is written either way."""
    words = ["train", "grpo", "--dry-run", "--as-gpus", "8", "--report", str(tmp_path)]
    assert command_line(words) == 0
    assert "It fits into 80 GiB" in capsys.readouterr().out
    assert json.loads((tmp_path / "dry-run.json").read_text())["ranks"] == 8
    assert (tmp_path / "memory.svg").is_file()
    assert command_line([*words, "--gpu-memory-gib", "6.05"]) == 1
    assert "does not fit" in capsys.readouterr().err


def test_a_larger_gpu_changes_nothing_but_the_verdict() -> None:
    """The peak is the program's."""
    small: Report = dry_run(RECIPES["grpo"](), accelerator=Accelerator(memory=2**20))
    large = dry_run(RECIPES["grpo"](), accelerator=Accelerator(memory=80 * GIB))
    assert small.peak == large.peak
    assert (small.fits, large.fits) == (False, True)
