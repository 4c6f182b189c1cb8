"""User-defined parts, without a change of the package: objective, sampler, reward, recipe and model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fluvial.core import log_prob
from fluvial.core.random import Key
from fluvial.core.transitions import Transition, dance_sde
from fluvial.engines import OptimizerConfig, TrainConfig, recipes
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.methods import Grpo
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import CheckpointConfig, MachineConfig
from fluvial.engines.run.method import Method, PassesConfig
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import RandomWindow
from fluvial.models.handwriting import BASE, Handwriting


class PullInfo(NamedTuple):
    log_prob: Tensor


@dataclass(frozen=True)
class Pull(Method):
    """REINFORCE on recorded steps, without a clip.

    Args:
        sampling: How samples are made.
        passes: How often a batch is learnt from.
        scale: Factor of the loss.
    """

    sampling: SamplingConfig = SamplingConfig()
    passes: PassesConfig = PassesConfig()
    scale: float = 1.0

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Climb the log-probability of every recorded step, weighted by the advantage of its sample."""
        grades = run.grade(batch)
        steps = run.record_steps(batch, key, grades.advantage, keep=grades.keep)
        for part in run.minibatches(steps, key, self.passes):
            yield run.update(part, self.loss)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PullInfo]:
        new = log_prob(rows.transition, rows.x, v, rows.x_next)
        return -self.scale * rows.signal * new, PullInfo(new.detach())


@dataclass(frozen=True)
class Twin(Grpo, name="twin"):
    """A method of one's own that is a built-in one by another name."""


def twin(model: str = "handwriting") -> TrainConfig:
    config = recipes.grpo(model)
    return replace(config, method=Twin(**{each.name: getattr(config.method, each.name) for each in fields(Twin)}))


def walk(level: Tensor, level_next: Tensor, *, eta: float) -> Transition:
    return dance_sde(level, level_next, eta=eta / 2)


def bold(images: Tensor, prompts: Sequence[str]) -> Tensor:
    return images.flatten(1).mean(1)


def recipe(model: str = "handwriting") -> TrainConfig:
    """Pull towards bold strokes, with settings that no built-in recipe shares."""
    return TrainConfig(
        Path("runs/pull"),
        model=model,
        rewards=("helpers.doors:bold",),
        updates=2,
        optimizer=OptimizerConfig(lr=0.02),
        method=Pull(
            sampling=SamplingConfig(
                prompts=2,
                group=4,
                steps=4,
                sampler=Stochastic("helpers.doors:walk", eta=0.5),
                window=RandomWindow(2, high=4),
            )
        ),
        engine=MachineConfig(micro_batch=8, update_micro_batch="rollout"),
        evaluation=EvaluationConfig(every=0, samples=8, final_samples=8),
        checkpoint=CheckpointConfig(every=1),
    )


def adapter() -> Any:
    return Handwriting(BASE)


def install(folder: Path, name: str, code: str, entries: str) -> None:
    """Write a package of one module, as an installer leaves it, with its entry points."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entries)
