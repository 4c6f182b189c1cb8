"""Warm-up of compiled blocks: every program is made in it, whatever sizes come later; else blocks run as written."""

import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.tiny_models import Net, data, squared
from rich.console import Console
from torch import Tensor, nn

from fluvial.engines.engine import parallelize
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.parallelize import count_programs
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import with_values
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.passes.micro_batch import Passes, run_once, warm_up
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Exception]]:
    """Compile to graphs that run as they are, and count none of before; the list may hold an error to raise instead."""
    real, errors = torch.compile, list[Exception]()

    def run(graph: Any, inputs: Any) -> Any:
        if errors:
            raise errors[0]
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=run))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield errors
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def rows(factor: int) -> Passes:
    """Return the passes of a net with a number of rows per sample."""

    def forward(module: nn.Module, size: int) -> Tensor:
        return module(torch.ones(size * factor, 3))

    return Passes(forward, forward)


def made(one: World, **options: Any) -> Engine:
    """Return an engine with two blocks."""
    net = Net()
    return Engine(net, list(net.blocks), OptimizerConfig(lr=0.1), one, sharding=EngineConfig(**options))


def test_no_size_after_the_warm_up_needs_a_program(one: World, backend: list[Exception]) -> None:
    """Blocks that are alike share programs: of one size, then of any. The weights, and their updates, are as without."""
    items, weight = data(12)
    warmed, plain = made(one, compile=True), made(one, compile=False)
    found = warm_up(warmed, [rows(1), rows(2)], 4)
    assert found.programs == count_programs() > 0
    assert found.failure is None
    for factor in (1, 2, 3, 5, 7):
        run_once(warmed, rows(factor), 4)
    for size in (3, 4, 6, 12):
        for engine in (warmed, plain):
            engine.update(items, squared(engine.module), weight, micro_batch=size)
    assert count_programs() == found.programs
    assert all(torch.equal(tensor, plain.state()[name]) for name, tensor in warmed.state().items())


def test_blocks_that_cannot_be_compiled_run_as_written(
    one: World, backend: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With auto; it is said. With True it is an error."""
    monkeypatch.setattr(EngineConfig, "compiles", lambda self, device: self.compile in (True, "auto"))
    backend.append(RuntimeError("no compiler here"))
    items, weight = data(4)
    refuses(
        r"engine\.compile is True, and the blocks cannot be compiled: .*no compiler here",
        warm_up,
        made(one, compile=True),
        [rows(1)],
        4,
    )
    torch._dynamo.reset()
    engine, plain = made(one, compile="auto"), made(one, compile=False)
    found = warm_up(engine, [rows(1), rows(2)], 4)
    assert "no compiler here" in str(found)
    for each in (engine, plain):
        each.update(items, squared(each.module), weight, micro_batch=2)
    assert all(torch.equal(tensor, plain.state()[name]) for name, tensor in engine.state().items())


def test_a_run_compiles_before_its_first_rollout(tmp_path: Path, one: World, backend: list[Exception]) -> None:
    """No update, rollout or evaluation makes a program."""
    config = tiny.config(
        tmp_path, updates=2, sampling=SamplingConfig(prompts=2, group=2, steps=tiny.STEPS), **{"engine.compile": True}
    )
    shown = Console(force_terminal=True, file=StringIO())
    with Trainer(config, tiny.job(), one) as trainer, RunProgress(shown, total=2) as progress:
        progress.begin(0)
        found = trainer.warm_up(progress)
        assert found is not None
        assert found.programs > 0
        trainer.evaluate(4)
        assert [trainer.update()["compiled_programs"] for _ in range(2)] == [0, 0]
        assert count_programs() == found.programs
    with Trainer(with_values(config, {"engine.compile": False}), tiny.job(), one) as trainer:
        assert trainer.warm_up() is None
        assert "compiled_programs" not in trainer.update()


def test_auto_is_on_for_gpus_alone() -> None:
    for options, on_cuda, on_cpu in (
        ({}, True, False),
        ({"compile": True}, True, True),
        ({"compile": False}, False, False),
        ({"checkpointing": "selective"}, False, False),
    ):
        config = EngineConfig(**options)
        assert (config.compiles(CUDA), config.compiles(CPU)) == (on_cuda, on_cpu)


def test_programs_are_kept_in_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless another is named, or it cannot be written."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    parallelize.compile_blocks([nn.Identity()])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    parallelize.compile_blocks([nn.Identity()])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "fluvial" / "compiled")
    assert (tmp_path / "fluvial" / "compiled").is_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    parallelize.compile_blocks([nn.Identity()])
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
