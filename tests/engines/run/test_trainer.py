"""The trainer, driven update by update: the same updates as a whole run, and the weights that it evaluates and exports."""

import json
from pathlib import Path

import pytest
import torch
from helpers import handwriting_jobs, launch
from helpers import tiny_jobs as tiny

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.run import train
from fluvial.engines.run.trainer import Trainer

AVERAGED = OptimizerConfig(lr=0.05, ema_decay=0.9)


def test_update_by_update_is_the_run(tmp_path: Path) -> None:
    """The records and the exported weights of `train`, to the bit; nothing else is written."""
    config = handwriting_jobs.config(tmp_path / "run", optimizer=OptimizerConfig(ema_decay=0.5))
    train(config, handwriting_jobs.job())
    with Trainer(config, handwriting_jobs.job()) as trainer:
        records = [trainer.update(), *trainer]
        assert list(trainer) == []
        trainer.export(tmp_path / "own")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "own"}
    assert launch.weights(tmp_path / "own") == launch.weights(tmp_path / "run")
    known = [record for record in launch.records(tmp_path / "run") if "loss" in record]
    for own, record in zip(json.loads(json.dumps(records)), known, strict=True):
        for timed in ("seconds", "speed", "memory"):
            assert set(own.pop(timed)) == set(record.pop(timed))
        assert own == record


def test_a_request_to_stop_ends_the_iteration(tmp_path: Path) -> None:
    """After the update that was going on."""
    with Trainer(tiny.config(tmp_path, updates=9), tiny.job()) as trainer:
        done = []
        for record in trainer:
            done.append(record["update"])
            if len(done) == 2:
                trainer.stop.name = "asked"
        assert done == [1, 2, 3]
        assert trainer.stopping


def test_the_world_is_the_callers_where_there_is_one(tmp_path: Path) -> None:
    """A trainer closes the world that it opened, and no other; in either it computes as `engine.deterministic` says."""
    strict = tiny.config(tmp_path, **{"engine.deterministic": True})
    with init_world() as world:
        with Trainer(strict, tiny.job(), world) as trainer:
            assert torch.are_deterministic_algorithms_enabled()
            trainer.update()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.distributed.is_initialized()
        with pytest.raises(UsageError, match=r"a process group is open already: pass the world of init_world\(\)"):
            Trainer(tiny.config(tmp_path), tiny.job())
        assert torch.distributed.is_initialized()
    with Trainer(tiny.config(tmp_path), tiny.job()):
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()
