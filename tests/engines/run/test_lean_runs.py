"""Runs with a quantised base, weights in bfloat16 and steps in the backward pass: resumed to the bit, or refused by name."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import handwriting_jobs
from helpers.marks import long
from safetensors.torch import load_file

from fluvial.engines.cli.eval import EvalConfig
from fluvial.engines.cli.eval_models import open_networks, settings_of_run
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.files import LORA
from fluvial.engines.run import train
from fluvial.engines.run.config import with_values
from fluvial.engines.run.exports import export_run
from fluvial.engines.sampling.config import RolloutConfig, ServersConfig
from fluvial.models.lora import Dora, Lokr, LoraConfig
from fluvial.models.quantised import find_quantised

WAYS: dict[str, dict[str, Any]] = {
    "nf4": {"train": "lora", "engine.base": "nf4", "engine.checkpointing": "host"},
    **{base: {"train": "lora", "engine.base": base} for base in ("int8", "int4", "fp8", "fp8_dynamic", "bfloat16")},
    "dora": {"train": "lora", "lora": LoraConfig(rank=4, form=Dora()), "engine.base": "int8"},
    "lokr": {"train": "lora", "lora": LoraConfig(rank=4, form=Lokr()), "engine.compute": "bfloat16"},
    "masters": {"train": "full", "engine.masters": "bfloat16"},
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
    """Two updates in one go, and one and one: the exported weights are the same."""
    settings = {"optimizer": OptimizerConfig(lr=1e-3, ema_decay=0.9, schedule="constant"), **WAYS[way]}
    straight, halves = (handwriting_jobs.config(tmp_path / name, **settings, updates=2) for name in ("straight", "halves"))
    train(straight, handwriting_jobs.job())
    train(replace(halves, updates=1), handwriting_jobs.job())
    train(replace(halves, resume=True), handwriting_jobs.job())
    expected, found = weights(straight.out), weights(halves.out)
    assert expected
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if way == "nf4":
        other = with_values(halves, {"resume": True, "updates": 3, "engine.base": "int8"})
        with pytest.raises(FluvialError, match="base_weights"):
            train(other, handwriting_jobs.job())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": "full", "engine.base": "nf4"}, "engine.base has no effect with train full"),
        ({"train": "lora", "engine.masters": "bfloat16"}, "engine.masters has no effect with train lora"),
    ],
)
def test_settings_of_other_weights_than_are_trained_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        handwriting_jobs.config(tmp_path, **changes)


def test_servers_have_no_quantised_base(tmp_path: Path) -> None:
    """Their weights are those of the folder, so ratios would be wrong from the start."""
    config = handwriting_jobs.config(tmp_path, train="lora")
    served = RolloutConfig(source="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=r"engine.base is 'int8', expected auto: servers make rollouts with weights"):
        with_values(config, {"rollout": served, "engine.base": "int8"})


@pytest.mark.parametrize("form", [Dora(), Lokr()], ids=str)
def test_servers_take_merged_weights_of_forms_that_are_not_lora(tmp_path: Path, form: Any) -> None:
    config = handwriting_jobs.config(tmp_path, train="lora", lora=LoraConfig(form=form))
    served = RolloutConfig(source="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=rf"servers take no adapters of lora.form {form.kind}, and merged weights do"):
        with_values(config, {"rollout": served})
    with_values(config, {"rollout": replace(served, servers=ServersConfig(weights="disk"))})


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
