"""Rollouts that a server makes ahead of the trainer: the bits of a second network here, and a server that dies."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import handwriting_jobs, launch

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import ServersConfig, Truncate


def config(out: Path, train: str = "full") -> TrainConfig:
    """Return a run of three rollouts, made one ahead."""
    return handwriting_jobs.config(out, updates=3, train=train, correction=Truncate(threshold=2.0), **{"rollout.ahead": 1})


def numbers(trainer: Trainer) -> list[list[object]]:
    """Return what a run's records say of samples, weights and their age."""
    return [[record[name] for name in ("reward", "loss", "staleness", "correction")] for record in trainer]


@pytest.mark.long
def test_a_server_makes_rollouts_ahead_with_the_bits_of_this_process(one: World, tmp_path: Path) -> None:
    """All weights, and adapters, of the version that belongs to each rollout; then the server is killed."""
    own = config(tmp_path)
    size = str(own.samples_per_pass)
    args = ["serve", "handwriting", "--port", "0", "--micro-batch", size, "--weights-root", str(tmp_path)]
    with launch.start(*args) as server:
        quick = ServersConfig(weights_folder=tmp_path, patience=2)
        there = replace(own.rollout, source=server.address(), servers=quick)
        for train in ("full", "lora"):
            with Trainer(config(tmp_path, train), handwriting_jobs.job(), one) as trainer:
                expected, last = numbers(trainer), trainer.engine.sharded.shards()
            served = with_values(config(tmp_path, train), {"rollout": there})
            with Trainer(served, handwriting_jobs.job(), one) as trainer:
                assert numbers(trainer) == expected
                for name, shard in trainer.engine.sharded.shards().items():
                    assert torch.equal(shard, last[name])
            assert [row[2] for row in expected] == [{"0": 8}, *[{"1": 8}] * 2]
        with Trainer(served, handwriting_jobs.job(), one) as trainer:
            trainer.update()
            server.kill()
            with pytest.raises(RunError, match=r"127\.0\.0\.1"):
                list(trainer)
