"""Trains on rollouts that are made ahead, on a number of ranks, for test_prefetch.py."""

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import tiny_jobs as tiny

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig, Truncate
from fluvial.engines.sampling.generate import Chunk
from fluvial.engines.sampling.samplers import Stochastic

UPDATES = 5


def config(out: Path, ahead: int) -> TrainConfig:
    """Return a run of 12 samples per rollout: with 2 ranks 4 slots are repeats."""
    return tiny.config(
        out,
        updates=UPDATES,
        optimizer=OptimizerConfig(lr=0.02),
        correction=Truncate(threshold=2.0),
        sampling=SamplingConfig(prompts=3, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5)),
        **{"engine.micro_batch": 4, "rollout.ahead": ahead},
    )


def told(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [[record["reward"]["mean"], record["grad_norm"], record["staleness"]] for record in records]


def trained(world: World, folder: str) -> list[list[Any]]:
    """Return the numbers of a run, whose checkpoint after two updates holds two rollouts."""
    with Trainer(config(Path(folder), 2), tiny.job(), world) as trainer:
        first = [trainer.update(), trainer.update()]
        trainer.save()
        return told([*first, *trainer])


def shared(world: World, folder: str) -> list[list[Any]]:
    """Return the numbers of a run whose ranks share a server: a file that says which weights it has.

    The last rank is slow. Rank 0 would overtake it, if it did not wait.
    """
    server = Path(folder) / "version"
    with Trainer(replace(config(Path(folder), 1)), tiny.job(), world) as trainer:
        assert trainer.ahead is not None
        trainer.ahead.local = False
        source: Any = trainer.sampler.source
        push, generate = source.push, source.generate

        def given(engine: Any, version: int) -> None:
            if world.is_main:
                server.write_text(str(version))
            push(engine, version)

        def made(*args: Any, **options: Any) -> Generator[Chunk, None, None]:
            for chunk in generate(*args, **options):
                time.sleep(0.0 if world.is_main else 0.05)
                yield chunk._replace(version=int(server.read_text()))

        source.push, source.generate = given, made
        return told([*trainer])
