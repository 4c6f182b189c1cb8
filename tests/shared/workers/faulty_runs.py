"""Runs that fail: with a reward that is bad on the last rank alone. For test_training.py."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run import train
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow
from fluvial.engines.scoring import runner


def raises(count: int) -> Tensor:
    raise KeyError("no model")


def exits(count: int) -> Tensor:
    sys.exit()


def hangs(count: int) -> Tensor:
    time.sleep(600)
    return torch.zeros(count)


BAD: dict[str, Callable[[int], Tensor]] = {
    "nan": lambda count: torch.full((count,), float("nan")),
    "shape": lambda count: torch.ones(1),
    "raises": raises,
    "exits": exits,
    "hangs": hangs,
}


def bad_reward(folder: str, kind: str) -> None:
    """Train on a reward that is bad on the last rank, and exit as the command line does."""
    runner.TIMEOUT = 1.0 if kind == "hangs" else 100.0

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        return BAD[kind](len(prompts)) if last else torch.arange(float(len(prompts)))

    def command(args: list[str]) -> int:
        rollout = SamplingConfig(prompts=2, group=4, steps=4, window=RandomWindow(2))
        config = TrainConfig(
            out=Path(folder),
            updates=1,
            method=Grpo(sampling=rollout),
            engine=MachineConfig(micro_batch=4, update_micro_batch="rollout"),
            evaluation=EvaluationConfig(final_samples=8),
        )
        train(config, replace(jobs.handwriting(), rewards={"it": reward}))
        return 0

    cli.exit_with(command, [])
