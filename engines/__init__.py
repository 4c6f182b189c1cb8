"""The stateful part: engine, rollouts, training runs, checkpoints and the command line.

The names below are the public surface. Each is imported on first use, so that `fluvial --help` need not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluvial.engines.errors import FluvialError, RunError, UsageError
    from fluvial.engines.evaluation.evaluate import evaluate
    from fluvial.engines.fsdp.config import EngineConfig, OptimizerConfig
    from fluvial.engines.fsdp.engine import Engine
    from fluvial.engines.fsdp.world import init_world
    from fluvial.engines.objectives.losses import KLConfig
    from fluvial.engines.rollout.config import RolloutConfig
    from fluvial.engines.rollout.score import score
    from fluvial.engines.train import recipes
    from fluvial.engines.train.config import TrainConfig
    from fluvial.engines.train.job import Job
    from fluvial.engines.train.trainer import Trainer

__all__ = [
    "Engine",
    "EngineConfig",
    "FluvialError",
    "Job",
    "KLConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunError",
    "TrainConfig",
    "Trainer",
    "UsageError",
    "evaluate",
    "init_world",
    "recipes",
    "score",
]

_HOMES = {
    "Engine": "fsdp.engine",
    "EngineConfig": "fsdp.config",
    "FluvialError": "errors",
    "Job": "train.job",
    "KLConfig": "objectives.losses",
    "OptimizerConfig": "fsdp.config",
    "RolloutConfig": "rollout.config",
    "RunError": "errors",
    "TrainConfig": "train.config",
    "Trainer": "train.trainer",
    "UsageError": "errors",
    "evaluate": "evaluation.evaluate",
    "init_world": "fsdp.world",
    "score": "rollout.score",
}
_MODULES = {"recipes": "train.recipes"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fluvial.engines.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fluvial.engines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
