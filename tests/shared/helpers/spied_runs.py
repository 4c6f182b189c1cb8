"""Runs of the tiny job that note what their updates are made of."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import tiny_jobs as tiny
from helpers.settings import settings_of
from torch import Tensor

from fluvial.core.rollout import Trajectory
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic

STEPS = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
ODE = SamplingConfig(prompts=2, group=4, steps=tiny.STEPS, sampler=Ode())
FAST = OptimizerConfig(lr=0.05)


class Update(NamedTuple):
    items: Any
    weight: Tensor
    over: float  # what the sum of its losses is divided by
    policy: dict[str, Tensor]  # before it


class Spied(tiny.Run):
    def __init__(self, config: TrainConfig, world: World, job: Any = None) -> None:
        super().__init__(config, world, job)
        self.trajectories: list[Trajectory] = []
        self.updates: list[Update] = []
        self.record: dict[str, Any] = {}  # of the last rollout, where a test notes it
        self.scores = torch.zeros(0, 0)  # rewards [B, K] of the last rollout
        trainer = self.trainer
        optimize, learn, pair_up = trainer.engine.update, trainer.learn, trainer.sampler.pair_up

        def noted(items: Any, loss_fn: Any, weight: Tensor, **options: Any) -> Any:
            self.updates.append(Update(items, weight, options["count"], self.weights()))
            return optimize(items, loss_fn, weight, **options)

        def learnt(batch: Batch, root: Any) -> Any:
            if not batch.paired:
                self.trajectories.append(batch.trajectory)
                self.records = list(batch.prompts)
                assert batch.rewards is not None
                self.prompts, self.scores = [prompt.text for prompt in self.records], batch.rewards.scores
            return learn(batch, root)

        def paired(chosen: Any, *args: Any) -> Any:
            self.preferences = list(chosen)
            return pair_up(chosen, *args)

        trainer.engine.update, trainer.learn, trainer.sampler.pair_up = noted, learnt, paired  # type: ignore

    def velocity(self, items: Any) -> Tensor:
        with self.trainer.engine.inference() as module:
            cond = self.trainer.job.model.encode([self.prompts[int(i)] for i in items.sample])
            return self.trainer.job.model.predict(module, items.x, items.level, cond)


def spy(world: World, line: str, job: Any = None, **changes: Any) -> Spied:
    """Return a run of two groups of four samples, with the settings of a line and others by dotted names."""
    return Spied(tiny.config(Path("out"), **{"sampling": STEPS, **settings_of(line), **changes}), world, job)


def rows_of(trainer: Any) -> list[tuple[bool, int]]:
    """Return a list that each pass of the network is added to: whether it has a gradient, and its number of rows."""
    passed = list[tuple[bool, int]]()

    def note(module: Any, inputs: Any, named: Any) -> None:
        passed.append((torch.is_grad_enabled(), len(inputs[0] if inputs else named["hidden_states"])))

    trainer.engine.module.register_forward_pre_hook(note, with_kwargs=True)
    return passed
