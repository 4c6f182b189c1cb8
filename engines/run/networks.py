"""The policy and the other networks of a run (reference, followers, teachers, critics), opened by name."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import optree
import torch
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import collective
from fluvial.engines.heads import read_head
from fluvial.engines.run.declared import (
    Base,
    Before,
    Follower,
    Networks,
    SameNetwork,
    Start,
    Teacher,
    Trained,
    find_followers,
    find_heads,
)
from fluvial.models import Cond, DiffusionModel
from fluvial.models.guidance import Guided
from fluvial.models.host_values import to_device
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter
from fluvial.models.padding import trim

START = "start"  # adapter that training started from, if it was not a new one


class BuiltNetworks:
    """Networks of a run, opened by name.

    With LoRA no network needs a copy of the base weights. The reference is the module without adapters, or with the adapter
    that training started from; followers, second trained networks and teachers' LoRAs are further adapters. A teacher with
    full weights, and the reference of full fine-tuning, are sharded modules without an optimizer.

    Args:
        declared: networks that the method declares.
        engine: engine of the policy.
        trained: engines of the other trained networks, by name.
        frozen: separate modules without an engine, by name.
        model: adapter of the architecture; it encodes the negative prompt of a reference with its own guidance scale.
        negative: negative prompt of the policy's guidance.
        continues: whether training started from a trained adapter.
    """

    def __init__(
        self,
        declared: Networks,
        engine: Engine,
        trained: Mapping[str, Engine],
        frozen: Mapping[str, ShardedModule],
        model: DiffusionModel,
        *,
        negative: str = "",
        continues: bool = False,
    ) -> None:
        self.declared, self.engine, self.trained = declared, engine, trained
        self.model, self.negative = model, negative
        modules = {name: each.sharded for name, each in trained.items() if each.sharded is not engine.sharded}
        self.separate = {**frozen, **modules}
        self.followers, self.heads = find_followers(declared), find_heads(declared)
        self.before = [name for name, network in declared.items() if isinstance(network, Before)]
        self.start = START if continues else None

    @collective
    @contextmanager
    def open(self, name: str) -> Iterator[nn.Module]:
        """Yield a network for forward passes without gradient."""
        name = self._resolve(name)
        if name in self.separate:
            self.engine.sharded.reshard()  # never gather both modules at the same time
            with self.separate[name].inference() as module:
                yield module
        else:
            with self.engine.inference() as module, self._use_adapter(name):
                yield module

    @property
    def updates(self) -> dict[str, int]:
        """Number of updates of each trained network."""
        return {"policy": self.engine.updates, **{name: engine.updates for name, engine in self.trained.items()}}

    @collective
    @contextmanager
    def train(self, name: str) -> Iterator[Engine]:
        """Yield the engine of a trained network, ready for an update."""
        engine = self.trained.get(name, self.engine)
        if name in self.separate:
            self.engine.sharded.reshard()
        with self._use_adapter(name):
            yield engine

    def _resolve(self, name: str) -> str:
        """Return the name of the network with the weights: a `SameNetwork` differs only in guidance."""
        network = self.declared.get(name)
        return network.network if isinstance(network, SameNetwork) else name

    def _use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the policy's module has the adapter of a network that is not a separate module."""
        network = self.declared.get(name)
        if name in self.separate or not isinstance(network, Start | Base | Follower | Teacher | Trained):
            return nullcontext()
        adapter = self.start if isinstance(network, Start) else None if isinstance(network, Base) else name
        return use_adapter(self.engine.module, adapter)

    def read_head(self, name: str, module: nn.Module) -> AbstractContextManager[list[Tensor]]:
        """Return a context with the list of a network head's outputs, one per forward pass inside it, see `heads`."""
        return read_head(module, self.model.blocks(module), name)

    @contextmanager
    def open_sampler(self) -> Iterator[nn.Module]:
        """Yield the network that currently generates rollouts: a follower with `samples_from`, else the policy."""
        with self.engine.inference() as module:
            follower = self.choose_sampler(self.engine.updates)
            with nullcontext() if follower is None else use_adapter(module, follower):
                yield module

    def choose_sampler(self, updates: int) -> str | None:
        """Return the follower that generates rollouts after a number of updates; None for the policy."""
        starts = {name: follower.samples_from for name, follower in self.followers.items()}
        return next((name for name, start in starts.items() if start is not None and updates >= start), None)

    def condition(self, name: str, cond: Cond) -> Cond:
        """Return the conditioning of a network, with its own guidance scale if it has one."""
        network = self.declared.get(name)
        if isinstance(network, Follower):
            network = self.declared.get(network.network)
        scale = getattr(network, "guidance", None)
        if scale is None:
            return cond
        plain = cond.cond if isinstance(cond, Guided) else cond
        if scale == 1:
            return plain
        first = optree.tree_leaves(plain)[0]
        if isinstance(cond, Guided):
            unconditional = cond.uncond
        else:
            one = self.model.encode([self.negative])
            pairs = zip(optree.tree_leaves(plain), optree.tree_leaves(one), strict=True)
            # Prompts may be padded to fewer tokens than the model's default length.
            one = trim(self.model, one, next((a.shape[1] for a, b in pairs if a.shape[1:] != b.shape[1:]), None))
            unconditional = optree.tree_map(lambda row: to_device(row, first.device).expand(len(first), *row.shape[1:]), one)
        return Guided(plain, unconditional, torch.full((len(first),), scale, device=first.device))

    def follow(self, rollouts: int) -> None:
        """Update each follower's weights w to d w + (1 - d) w_leader; every rank updates its own shards.

        Args:
            rollouts: number of rollouts so far.
        """
        for name, follower in self.followers.items():
            decay = follower.decay(rollouts, self.engine.updates)
            leader = "default" if follower.network == "policy" else follower.network
            if decay == 0:
                copy_adapter(self.engine.module, leader, name)
            else:
                blend_adapter(self.engine.module, leader, name, decay)

    def offload(self) -> None:
        """Offload all that a rollout does not need: separate modules, and optimizer states."""
        for module in self.separate.values():
            module.offload()
        for engine in self.trained.values():
            engine.offload(parameters=False)

    def onload(self) -> None:
        """Move everything that `offload` moved back to the device."""
        for module in self.separate.values():
            module.onload()
        for engine in self.trained.values():
            engine.onload()
