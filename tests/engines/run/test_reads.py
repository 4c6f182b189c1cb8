"""The trainer's own update: the host waits for the device as often whatever the number of micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_jobs import Run, config

from fluvial.bench.counting import HostReads
from fluvial.engines.engine.world import World
from fluvial.engines.methods.table import Dppo, Grpo, Guard
from fluvial.engines.run.config import with_values
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import RandomWindow


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize(
    ("sampler", "objective"), [("flow_sde", Grpo()), ("flow_sde", Guard()), ("flow_sde", Dppo()), ("cps", Grpo())]
)
def test_no_read_a_micro_batch(
    tmp_path: Path, one: World, sampler: Any, objective: Any, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch, 2 or 8: as many reads, one of which is the engine's read-back."""
    reads = []
    for micro_batch in (16, 8, 2):
        rollout = SamplingConfig(
            prompts=2,
            group=4,
            steps=4,
            sampler=Stochastic(sampler),
            window=RandomWindow(2, high=3),
            guidance=Guidance(guidance),
        )
        run = Run(
            with_values(config(tmp_path, sampling=rollout, method=objective), {"engine.micro_batch": micro_batch}), one
        )
        engine, counters = run.trainer.engine, list[int]()

        def counted(*args: Any, counters: list[int] = counters, optimize: Any = engine.update, **kwargs: Any) -> Any:
            with HostReads() as counter:
                info = optimize(*args, **kwargs)
            counters.append(counter.total)
            return info

        monkeypatch.setattr(engine, "update", counted)
        run.rollout()
        run.trainer.close()
        reads.append(counters)
        assert torch.isfinite(next(iter(run.weights().values()))).all()
    assert reads == [[1], [1], [1]]
