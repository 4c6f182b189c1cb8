"""Runs with a quantised base, weights in bfloat16 and steps in the backward pass: resumed to the bit, or refused by name."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import handwriting_jobs
import pytest
import torch
from safetensors.torch import load_file

from fluvial.engines.cli.eval import EvalConfig
from fluvial.engines.cli.eval_models import opened, settings_of_run
from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.fsdp.config import EngineConfig, OptimizerConfig
from fluvial.engines.fsdp.world import init_world
from fluvial.engines.train import train
from fluvial.models.quantised import quantised_layers

WAYS: dict[str, dict[str, Any]] = {
    "nf4": {"train": "lora", "engine": EngineConfig(base="nf4", checkpointing="host")},
    **{base: {"train": "lora", "engine": EngineConfig(base=base)} for base in ("int8", "int4", "fp8", "bfloat16")},
    "masters": {"train": "full", "engine": EngineConfig(masters="bfloat16")},
    "step": {"train": "full", "engine": EngineConfig(grad_sync="step", masters="bfloat16"), "update_micro_batch": 64},
}


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the exported weights of a run."""
    return {
        f"{file.name} {name}": tensor
        for file in sorted((out / "weights").rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_to_the_bit(tmp_path: Path, way: str) -> None:
    """Four updates in one go, and two and two: the exported weights are the same."""
    settings = {"optimizer": OptimizerConfig(lr=1e-3, ema_decay=0.9, schedule="constant"), **WAYS[way]}
    straight, halves = (handwriting_jobs.config(tmp_path / name, **settings, updates=4) for name in ("straight", "halves"))
    train(straight, handwriting_jobs.job())
    train(replace(halves, updates=2), handwriting_jobs.job())
    train(replace(halves, resume=True), handwriting_jobs.job())
    expected, found = weights(straight.out), weights(halves.out)
    assert expected
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if way == "nf4":
        other = replace(halves, resume=True, updates=6, engine=EngineConfig(base="int8"))
        with pytest.raises(FluvialError, match="base_weights"):
            train(other, handwriting_jobs.job())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": "full", "engine": EngineConfig(base="nf4")}, "engine.base has no effect with train full"),
        ({"train": "lora", "engine": EngineConfig(masters="bfloat16")}, "engine.masters has no effect with train lora"),
    ],
)
def test_settings_of_other_weights_than_are_trained_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        handwriting_jobs.config(tmp_path, **changes)


def test_servers_have_no_quantised_base(tmp_path: Path) -> None:
    """Their weights are those of the folder, so ratios would be wrong from the start."""
    config = handwriting_jobs.config(tmp_path, train="lora")
    served = replace(config.rollout, source="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=r"engine.base is 'int8', expected auto: servers make rollouts with weights"):
        replace(config, rollout=served, engine=EngineConfig(base="int8"))


@pytest.mark.long
def test_an_export_is_evaluated_as_it_is(tmp_path: Path) -> None:
    """Its weights are dequantised, and not rounded again; what the run started from is quantised as in the run."""
    config = handwriting_jobs.config(tmp_path / "run", train="lora", engine=EngineConfig(base="int4"))
    train(config, handwriting_jobs.job())
    asked = settings_of_run(str(config.out), EvalConfig(base="start"))
    with init_world() as world, ExitStack() as stack:
        subjects = opened(str(config.out), asked, world, stack)
        with subjects.ours.network() as module:
            assert not quantised_layers(module)
        assert subjects.base is not None
        with subjects.base.network() as module:
            assert {layer.base for layer in quantised_layers(module).values()} == {"int4"}
