"""The source of a run, by its configuration."""

from pathlib import Path

from fluvial.engines.fsdp.world import World
from fluvial.engines.rollout.config import REPLAYED, RolloutConfig
from fluvial.engines.sources.in_process import InProcess
from fluvial.engines.sources.protocol import Behaviour, RolloutSource
from fluvial.engines.sources.stored import Replayed, Storing
from fluvial.models import DiffusionModel


def build_source(
    rollout: RolloutConfig, model: DiffusionModel, behaviour: Behaviour, world: World, *, resume: bool = False
) -> RolloutSource:
    """Return what makes the samples of a run.

    Args:
        rollout: how samples are made, and where.
        model: adapter of the architecture.
        behaviour: opens the network that makes the rollouts.
        world: process group.
        resume: whether the run goes on, so that `rollout.store` may hold its rollouts.

    Raises:
        UsageError: the source, or the folder of `rollout.store`, cannot be used.
    """
    if rollout.source.startswith(REPLAYED):
        return Replayed(Path(rollout.source.removeprefix(REPLAYED)), model)
    source = InProcess(model, behaviour)
    return source if rollout.store is None else Storing(source, rollout.store, world, resume=resume)
