"""The velocities that an objective compares with: of the policy before the update, of the reference, of a teacher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.items import micro_batches
from fluvial.engines.fsdp.module import ShardedModule
from fluvial.engines.fsdp.world import World
from fluvial.engines.objectives.table import Distill
from fluvial.engines.rollout.items import Items
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter, without_lora
from fluvial.models.protocol import Weights

# velocity(module, pairs) -> v [P, ...]
Velocity = Callable[[nn.Module, Items], Tensor]


class Policies:
    """The other policies of a run: what is needed of them, and no more.

    Memory: with LoRA the reference is the module without its adapters and the old policy another adapter, and neither costs
    a copy; a teacher, and the reference of full fine-tuning, are sharded modules without optimizer.

    Args:
        config, job, world: of the run.
        build: makes the network as it is trained, before sharding.
        weights: folder that its parameters are read from, if it comes without.

    Raises:
        UsageError: the teacher cannot be loaded.
    """

    def __init__(
        self, config: TrainConfig, job: Job, world: World, *, build: Callable[[Job], nn.Module], weights: Weights | None
    ) -> None:
        objective = config.objective
        self.needs_reference = config.kl.coef > 0 or "ref" in objective.compares_with
        self.keeps_old = config.keeps_old
        self.reference: ShardedModule | None = None
        self.teacher: ShardedModule | None = None
        if self.needs_reference and config.train == "full":
            self.reference = _frozen(config, job, world, build, weights)
        if isinstance(objective, Distill):
            assert objective.teacher is not None
            taught = job.with_weights(objective.teacher)
            self.teacher = _frozen(config, taught, world, build, None if weights is None else taught.model.weights)

    @contextmanager
    def behaviour(self, engine: Engine) -> Iterator[nn.Module]:
        """Give the network that makes the rollouts: the old policy where there is one that lags behind, else the policy."""
        with engine.inference() as module:
            if not self.keeps_old:
                yield module
                return
            with use_adapter(module, "old"):
                yield module

    def follow(self, engine: Engine, decay: float) -> None:
        """Move the old policy to decay old + (1 - decay) policy; every rank its own shards."""
        if decay == 0:
            copy_adapter(engine.module, "default", "old")
        else:
            blend_adapter(engine.module, "default", "old", decay)

    @contextmanager
    def referring(self, engine: Engine) -> Iterator[nn.Module]:
        """Give the reference: the policy that training began with."""
        if self.reference is not None:
            with self.reference.inference() as module:
                yield module
            return
        with engine.inference() as module, without_lora(module):
            yield module

    @contextmanager
    def teaching(self) -> Iterator[nn.Module]:
        """Give the teacher."""
        assert self.teacher is not None
        with self.teacher.inference() as module:
            yield module

    def offload(self) -> None:
        """Move what does not take part in a rollout to the host."""
        for module in (self.reference, self.teacher):
            if module is not None:
                module.offload()

    def onload(self) -> None:
        """Bring it back."""
        for module in (self.reference, self.teacher):
            if module is not None:
                module.onload()


def velocities(
    velocity: Velocity, module: nn.Module, items: Items, *, micro_batch: int, pad_to: int, device: torch.device
) -> Tensor:
    """Return every pair's velocity, `[P, ...]`, in the update's own micro-batches: the same bits, as many on every rank."""
    chunks = micro_batches(items, micro_batch=micro_batch, pad_to=pad_to, device=device)
    return torch.cat([velocity(module, chunk) for chunk in chunks])[: len(items.level)]


def _frozen(
    config: TrainConfig, job: Job, world: World, build: Callable[[Job], nn.Module], weights: Weights | None
) -> ShardedModule:
    """Return a job's network for forward passes."""
    with world.agreed():
        for folder in {} if weights is None else [weights] if isinstance(weights, Path) else weights.values():
            if not (folder / "config.json").is_file():
                raise UsageError(f"{folder} holds no model: config.json is missing (--objective.teacher names a teacher)")
        module = build(job).requires_grad_(False)
    return ShardedModule(module, job.model.blocks(module), world, config.engine, weights=weights)
