"""The property of every resumption: a run that is saved, and goes on in a new trainer, is the run that was left alone."""

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import Job
from fluvial.engines.run.trainer import Trainer

TIMED = ("seconds", "speed", "memory")


def untimed(record: dict[str, Any]) -> str:
    """Return what a record says apart from times and memory, as it is written: a NaN is equal to a NaN there."""
    return json.dumps({name: value for name, value in record.items() if name not in TIMED}, sort_keys=True)


def state_of(trainer: Trainer) -> tuple[dict[str, Tensor], str]:
    """Return copies of all tensors of a checkpoint, and the counters and statistics of the run."""
    told = {"progress": {**asdict(trainer.progress), "seconds": None}, "state": dict(trainer.run.state)}
    return {name: value.clone() for name, value in trainer.saver.state().items()}, json.dumps(told, sort_keys=True)


def expect_resumed(config: TrainConfig, job: Job, world: World, *, after: int = 1) -> None:
    """Expect the same tensors, statistics and records to the bit, where a run is saved after some rollouts, and at its end.

    Every tensor of a checkpoint counts: weights, moments, averages, policies that follow, further networks.
    """
    with Trainer(config, job, world) as whole:
        for _ in range(after):
            whole.update()
        whole.save()
        begun, records, ended = state_of(whole), [untimed(record) for record in whole], state_of(whole)
    assert records
    (saved,) = (config.out / "checkpoints").glob("[0-9]*")
    with Trainer(config, job, world, resume_from=saved) as resumed:
        _expect_equal(state_of(resumed), begun)
        assert [untimed(record) for record in resumed] == records
        _expect_equal(state_of(resumed), ended)
    assert any(not torch.equal(value, ended[0][name]) for name, value in begun[0].items())


def _expect_equal(found: tuple[dict[str, Tensor], str], expected: tuple[dict[str, Tensor], str]) -> None:
    assert found[0].keys() == expected[0].keys()
    assert [name for name, value in expected[0].items() if not torch.equal(found[0][name], value)] == []
    assert found[1] == expected[1]
