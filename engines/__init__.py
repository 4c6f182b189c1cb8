"""The stateful part: engine, rollouts, training runs, checkpoints and the command line.

The names below are the public interface. Each is imported on first use, so that `fluvial --help` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
    from fluvial.engines.engine.engine import Engine
    from fluvial.engines.engine.world import init_world
    from fluvial.engines.errors import FluvialError, RunError, UsageError
    from fluvial.engines.methods.losses import KLConfig
    from fluvial.engines.run import recipes
    from fluvial.engines.run.config import TrainConfig, with_values
    from fluvial.engines.run.evaluation.evaluate import evaluate
    from fluvial.engines.run.job import Job
    from fluvial.engines.run.jobs.settings import MachineConfig
    from fluvial.engines.run.trainer import Trainer
    from fluvial.engines.sampling.config import RolloutConfig
    from fluvial.engines.sampling.score import score

__all__ = [
    "Engine",
    "EngineConfig",
    "FluvialError",
    "Job",
    "KLConfig",
    "MachineConfig",
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
    "with_values",
]

_HOMES = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "FluvialError": "errors",
    "Job": "run.job",
    "KLConfig": "methods.losses",
    "MachineConfig": "run.jobs.settings",
    "OptimizerConfig": "engine.config",
    "RolloutConfig": "sampling.config",
    "RunError": "errors",
    "TrainConfig": "run.config",
    "Trainer": "run.trainer",
    "UsageError": "errors",
    "evaluate": "run.evaluation.evaluate",
    "init_world": "engine.world",
    "score": "sampling.score",
    "with_values": "run.config",
}
_MODULES = {"recipes": "run.recipes"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fluvial.engines.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fluvial.engines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
