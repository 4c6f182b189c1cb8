"""The policies of a run besides the one that is trained: the old one, the reference, a teacher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import optree
import torch
from torch import Tensor, nn

from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.engine import Engine
from fluvial.engines.fsdp.module import ShardedModule
from fluvial.engines.fsdp.world import World
from fluvial.engines.rollout.items import Items
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.models import Cond
from fluvial.models.guidance import Guided
from fluvial.models.host_values import to_device
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter
from fluvial.models.padding import trimmed
from fluvial.models.protocol import Weights

# predict(module, items, cond, pad_to) -> v [P, ...]
Predict = Callable[[nn.Module, Items, Cond, int], Tensor]

START = "start"  # adapter that training started from, where that is not a new one


class Policies:
    """The other policies that a run needs, and no more.

    With LoRA the reference is the module without its adapters, or with the adapter that training started from, and a policy
    that lags behind is another adapter: neither needs a copy. A teacher, and the reference of full fine-tuning, are sharded
    modules without an optimizer.

    Args:
        world: process group that modules are sharded over.
        build: function that returns the network of a job before sharding.
        weights: folder that its parameters are read from, if `build` leaves them out.

    Raises:
        UsageError: the teacher cannot be loaded.
    """

    def __init__(
        self, config: TrainConfig, job: Job, world: World, *, build: Callable[[Job], nn.Module], weights: Weights | None
    ) -> None:
        traits = config.objective.traits
        self.followers = {follower.name: follower for follower in config.followers}
        self.needs_reference = config.kl.coef > 0 or "ref" in traits.compares_with
        # Whether the old policy is the policy before a rollout's first update, and no rollout records its prediction.
        self.old_is_the_policy = (
            traits.trains_on != "steps" and "old" in traits.compares_with and "old" not in self.followers
        )
        self.start = None if config.lora.weights is None else START
        self.model = job.model
        scale = config.kl.guidance  # of the reference, where it has guidance of its own
        self.guidance = None if scale is None else replace(config.rollout.guidance, scale=scale)
        self._frozen: dict[str, ShardedModule] = {}  # policies that are a module of their own
        if self.needs_reference and config.train == "full":
            self._frozen["ref"] = _frozen(config, job, world, build, weights)
        if "teacher" in traits.compares_with:
            assert traits.teacher is not None
            taught = job.with_weights(traits.teacher)
            self._frozen["teacher"] = _frozen(
                config, taught, world, build, None if weights is None else taught.model.weights
            )

    @contextmanager
    def behaviour(self, engine: Engine) -> Iterator[nn.Module]:
        """Yield the network that makes the rollouts: the follower that samples at this point, else the policy."""
        with engine.inference() as module:
            follower = self.sampling_adapter(engine.updates)
            with nullcontext() if follower is None else use_adapter(module, follower):
                yield module

    def sampling_adapter(self, updates: int) -> str | None:
        """Return the follower that makes the rollouts after a number of updates; None where the policy does."""
        starts = {name: follower.samples_from for name, follower in self.followers.items()}
        by_now = [name for name, start in starts.items() if start is not None and updates >= start]
        return by_now[0] if by_now else None

    def follow(self, engine: Engine, rollouts: int) -> None:
        """Move each follower to d it + (1 - d) policy; every rank moves its own shards.

        Args:
            rollouts: number of rollouts made so far.
        """
        for name, follower in self.followers.items():
            decay = follower.decay(rollouts, engine.updates)
            if decay == 0:
                copy_adapter(engine.module, "default", name)
            else:
                blend_adapter(engine.module, "default", name, decay)

    def compared(self, items: Items, cond: Cond, engine: Engine, predict: Predict, *, pad_to: int) -> Items:
        """Return items with the predictions of the other policies that they do not have; every rank must take part.

        Args:
            engine: engine of the policy that is trained.
            predict: function that returns a network's prediction at each item.
            pad_to: largest number of items of any rank.
        """
        names: list[str] = [name for name in self.followers if name != "sampling"]
        if self.needs_reference and "ref" not in names:
            names.append("ref")
        if "teacher" in self._frozen:
            names.append("teacher")
        found = dict(items.predictions)
        # Modules of their own come first, so that they and the engine's are not gathered at the same time.
        for name in sorted(names, key=lambda name: name not in self._frozen):
            if name not in found:
                with self._network(engine, name) as module:
                    found[name] = predict(module, items, self._referring_to(cond) if name == "ref" else cond, pad_to)
        return items._replace(predictions=found)

    @contextmanager
    def _network(self, engine: Engine, name: str) -> Iterator[nn.Module]:
        """Yield the network of another policy; the reference of LoRA is the policy that training started from."""
        if name in self._frozen:
            engine.sharded.reshard()
            with self._frozen[name].inference() as module:
                yield module
            return
        with engine.inference() as module, use_adapter(module, name if name in self.followers else self.start):
            yield module

    def _referring_to(self, cond: Cond) -> Cond:
        """Return the conditioning of the reference, whose guidance may be another than the policy's."""
        if self.guidance is None:
            return cond
        plain = cond.cond if isinstance(cond, Guided) else cond
        if self.guidance.scale == 1:
            return plain
        first = optree.tree_leaves(plain)[0]
        if isinstance(cond, Guided):
            negative = cond.uncond
        else:
            one = self.model.encode([self.guidance.negative])
            pairs = zip(optree.tree_leaves(plain), optree.tree_leaves(one), strict=True)
            # Prompts may be padded to fewer tokens than the model's own length.
            one = trimmed(self.model, one, next((a.shape[1] for a, b in pairs if a.shape[1:] != b.shape[1:]), None))
            negative = optree.tree_map(lambda row: to_device(row, first.device).expand(len(first), *row.shape[1:]), one)
        return Guided(plain, negative, torch.full((len(first),), self.guidance.scale, device=first.device))

    def offload(self) -> None:
        """Move the modules that do not take part in a rollout to the host."""
        for module in self._frozen.values():
            module.offload()

    def onload(self) -> None:
        """Move these modules back to the device."""
        for module in self._frozen.values():
            module.onload()


def _frozen(
    config: TrainConfig, job: Job, world: World, build: Callable[[Job], nn.Module], weights: Weights | None
) -> ShardedModule:
    """Return a job's network for forward passes alone."""
    with world.agreed():
        for folder in {} if weights is None else [weights] if isinstance(weights, Path) else weights.values():
            if not (folder / "config.json").is_file():
                raise UsageError(
                    f"{folder} holds no model, config.json is missing: set `objective.teacher` to a folder of weights"
                )
        module = build(job).requires_grad_(False)
    return ShardedModule(module, job.model.blocks(module), world, config.engine, weights=weights)
