"""Faults, each planted into a run: the checks of `dry_runs.check` find every one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.dry_runs import check
from torch import Tensor

from fluvial.engines.extensions.dryrun.run import dry_run
from fluvial.engines.extensions.simulate.device import Accelerator
from fluvial.engines.run.config import with_values
from fluvial.engines.run.recipes import RECIPES
from fluvial.models.handwriting.model import Handwriting

pytestmark = pytest.mark.simulated


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change every prediction: a function of it and of the samples."""
    predict = Handwriting.predict

    def changed(self: Any, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return change(predict(self, module, x, *args, **kwargs), x)

    monkeypatch.setattr(Handwriting, "predict", changed)


def test_a_tensor_left_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda v, x: v * torch.ones(x.shape))
    report = dry_run(RECIPES["grpo"]())
    assert report.error is not None
    assert "cpu" in report.error
    with pytest.raises(AssertionError, match="device"):
        check(report)


def test_a_read_in_the_loop_over_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda v, x: v / max(float(v.abs().max()), 1.0))
    report = dry_run(RECIPES["grpo"]())
    reads = [wait for wait in report.find_phase("rollout").waits if wait.kind == "read"]
    assert "test_faults.py" in reads[0].line
    assert reads[0].times >= RECIPES["grpo"]().method.sampling.steps
    with pytest.raises(AssertionError, match="reads of the update"):
        check(report)


def test_a_blocking_copy_in_the_loop_over_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda v, x: v * torch.ones(x.shape[-1]).to(x.device))
    report = dry_run(RECIPES["grpo"]())
    for name in ("rollout", "update"):
        lines = [wait.line for wait in report.find_phase(name).waits if wait.kind == "blocking copy to the device"]
        assert "test_faults.py" in lines[0]
    with pytest.raises(AssertionError, match="blocking copies"):
        check(report)


def test_an_extra_gather_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_values(RECIPES["grpo"](), {"engine.update_micro_batch": 8})
    config = with_values(config, {"engine.replicas": 1, "engine.compute": "bfloat16"})  # sharded by FSDP2
    check(dry_run(config, ranks=8), units=5)
    predict = Handwriting.predict

    def freed(self: Any, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        for unit in module.modules() if torch.is_grad_enabled() else ():
            if hasattr(unit, "reshard"):
                unit.reshard()
        return predict(self, module, *args, **kwargs)

    monkeypatch.setattr(Handwriting, "predict", freed)
    with pytest.raises(AssertionError, match=r"gathers of an update, expected 5"):
        check(dry_run(config, ranks=8), units=5)


def test_a_micro_batch_that_does_not_fit_is_found() -> None:
    gpu = Accelerator(memory=64 * 2**20)
    config = with_values(RECIPES["grpo"](), {"engine.micro_batch": 8, "engine.update_micro_batch": 8})
    check(dry_run(config, accelerator=gpu))
    large = dry_run(with_values(config, {"engine.update_micro_batch": 256}), accelerator=gpu)
    assert not large.fits
    assert large.find_phase("update").peak > gpu.memory
    with pytest.raises(AssertionError, match="bytes"):
        check(large)
