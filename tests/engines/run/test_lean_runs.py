"""Runs with a quantised base and with adapters that are not LoRA: exported and continued from, or refused by name."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import handwriting_jobs
from helpers.marks import long
from safetensors.torch import load_file

from fluvial.engines.cli.eval import EvalConfig
from fluvial.engines.cli.eval_models import open_networks, settings_of_run
from fluvial.engines.engine.world import init_world
from fluvial.engines.files import LORA
from fluvial.engines.run import train
from fluvial.engines.run.exports import export_run
from fluvial.models.lora import Dora, Lokr, LoraConfig
from fluvial.models.quantised import find_quantised


@pytest.mark.parametrize("form", [Dora(), long(Lokr())], ids=str)
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
    asked = settings_of_run(str(config.out), EvalConfig(base="start"))
    with init_world() as world, ExitStack() as stack:
        subjects = open_networks(str(config.out), asked, world, stack)
        with subjects.ours.network() as module:
            assert not find_quantised(module)
        assert subjects.base is not None
        with subjects.base.network() as module:
            assert {layer.base for layer in find_quantised(module).values()} == {"int4"}
