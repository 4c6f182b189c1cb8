"""Runs of the built-in job in this process, small and with a reward that needs no recogniser."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import stored
from torch import Tensor

from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run import train
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import CheckpointConfig, MachineConfig
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow
from fluvial.engines.scoring.protocol import Reward


def config(out: Path, /, **changes: Any) -> TrainConfig:
    """Return the configuration of a run of two updates of eight samples."""
    rollout = SamplingConfig(prompts=2, group=4, steps=4, window=RandomWindow(2))
    run = TrainConfig(
        out=out,
        updates=2,
        method=Grpo(sampling=rollout),
        evaluation=EvaluationConfig(every=0, final_samples=8, samples=8),
        checkpoint=CheckpointConfig(every=2),
        engine=MachineConfig(micro_batch=4, update_micro_batch="rollout"),
    )
    return with_values(run, changes)


def alternating(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return torch.arange(len(prompts)).float() % 2


def job(reward: Reward = alternating, *, weights: Path | None = None, **changes: Any) -> jobs.Job:
    return replace(jobs.build_job("handwriting", weights=weights), rewards={"reward": reward}, **changes)


def trained(out: Path, **changes: Any) -> Path:
    """Return `out` with a copy of the finished run of a configuration, which tests with the same changes share."""
    key = hashlib.sha256(repr(sorted(changes.items())).encode()).hexdigest()[:16]
    return stored.copy_of(f"handwriting-{key}", out, lambda folder: train(config(folder, **changes), job()))


def updates(config: TrainConfig, job_of: jobs.Job | None = None, *, count: int = 1) -> list[dict[str, Any]]:
    """Return the records of a run's first updates, without what a whole run adds: evaluations, exports and a folder."""
    with Trainer(config, job() if job_of is None else job_of) as trainer:
        return [trainer.update() for _ in range(count)]
