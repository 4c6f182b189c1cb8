"""Memory that a process frees is used again: page faults are counted."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from helpers import handwriting_jobs, launch

from fluvial.bench import pretrain
from fluvial.engines.cli import eval as evaluating
from fluvial.engines.run import train, training
from fluvial.engines.run.process import heap


@pytest.fixture
def default_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the environment says of malloc."""
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("default_malloc")
def test_later_batches_take_their_memory_without_page_faults() -> None:
    """By default there are thousands of them per batch."""
    assert launch.call("workers.heaps:faults", True) < 1000
    assert launch.call("workers.heaps:faults", False) > 10_000


@pytest.mark.long
@pytest.mark.usefixtures("default_malloc")
def test_backward_passes_take_their_memory_without_page_faults() -> None:
    """By default there are tens of thousands of them per pass."""
    assert launch.call("workers.heaps:backward_faults", False) > 10_000
    assert launch.call("workers.heaps:backward_faults", True) < 1000


class Asked(Exception):
    """`keep_freed_memory` was called."""


@pytest.mark.parametrize("module", [training, pretrain, evaluating], ids=["train", "pretrain", "eval"])
def test_runs_keep_freed_memory_before_anything_else(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> None:
        raise Asked

    starts: dict[ModuleType, Callable[[], object]] = {
        training: lambda: train(handwriting_jobs.config(tmp_path / "run")),
        pretrain: lambda: pretrain.pretrain(pretrain.handwriting_pretraining(tmp_path / "base")),
        evaluating: lambda: evaluating.run(["handwriting"]),
    }
    monkeypatch.setattr(module, "keep_freed_memory", asked)
    with pytest.raises(Asked):
        starts[module]()


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    heap.keep_freed_memory()
