"""The stateful part: engine, rollouts, training runs, checkpoints and the command line.

The names below are the public surface. Each is imported on first use, so that `fluvial --help` need not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluvial.engines.fsdp.config import EngineConfig, OptimizerConfig
    from fluvial.engines.fsdp.engine import Engine
    from fluvial.engines.fsdp.world import init_world
    from fluvial.engines.rollout.score import score
    from fluvial.engines.train import recipes
    from fluvial.engines.train.config import TrainConfig
    from fluvial.engines.train.job import Job
    from fluvial.engines.train.trainer import Trainer, train

__all__ = [
    "Engine",
    "EngineConfig",
    "Job",
    "OptimizerConfig",
    "TrainConfig",
    "Trainer",
    "init_world",
    "recipes",
    "score",
    "train",
]

_HOMES = {
    "Engine": "fsdp.engine",
    "EngineConfig": "fsdp.config",
    "Job": "train.job",
    "OptimizerConfig": "fsdp.config",
    "TrainConfig": "train.config",
    "Trainer": "train.trainer",
    "init_world": "fsdp.world",
    "score": "rollout.score",
}
_MODULES = {"recipes": "train.recipes", "train": "train"}  # the folder `train` can be called, see there


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fluvial.engines.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fluvial.engines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
