"""Networks beside the policy, as a run builds and opens them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import optree
import torch
from torch import nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.run.declared import Follower, Networks, Start, find_followers
from fluvial.models import Cond, DiffusionModel
from fluvial.models.guidance import Guided
from fluvial.models.host_values import to_device
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter
from fluvial.models.padding import trim

START = "start"  # adapter that training started from, where that is not a new one


class BuiltNetworks:
    """The networks of a run, opened by name.

    With LoRA the reference is the module without its adapters, or with the adapter that training started from, and a
    follower is another adapter: neither needs a copy. A teacher, and the reference of full fine-tuning, are sharded modules
    without an optimizer.

    Args:
        declared: networks that the method declares.
        engine: engine of the policy.
        frozen: networks that are a module of their own, by name.
        model: adapter of the architecture, which encodes the negative prompt of a reference with guidance of its own.
        continues: whether training started from a trained adapter.
    """

    def __init__(
        self,
        declared: Networks,
        engine: Engine,
        frozen: Mapping[str, ShardedModule],
        model: DiffusionModel,
        *,
        continues: bool = False,
    ) -> None:
        self.declared, self.engine, self.frozen, self.model = declared, engine, frozen, model
        self.followers = find_followers(declared)
        self.start = START if continues else None

    @contextmanager
    def open(self, name: str) -> Iterator[nn.Module]:
        """Yield a network for forward passes without gradient; every rank must take part."""
        if name in self.frozen:
            self.engine.sharded.reshard()  # so that both modules are not gathered at the same time
            with self.frozen[name].inference() as module:
                yield module
        elif isinstance(self.declared.get(name), Start | Follower):
            with self.engine.inference() as module, use_adapter(module, name if name in self.followers else self.start):
                yield module
        else:
            with self.engine.inference() as module:
                yield module

    @contextmanager
    def open_sampler(self) -> Iterator[nn.Module]:
        """Yield the network that makes the rollouts: the follower that samples at this point, else the policy."""
        with self.engine.inference() as module:
            follower = self.sampling_adapter(self.engine.updates)
            with nullcontext() if follower is None else use_adapter(module, follower):
                yield module

    def sampling_adapter(self, updates: int) -> str | None:
        """Return the follower that makes the rollouts after a number of updates; None where the policy does."""
        starts = {name: follower.samples_from for name, follower in self.followers.items()}
        return next((name for name, start in starts.items() if start is not None and updates >= start), None)

    def condition(self, name: str, cond: Cond, negative: str) -> Cond:
        """Return the conditioning of a network, whose guidance may be another than the policy's.

        Args:
            negative: negative prompt of the policy's guidance.
        """
        declared = self.declared.get(name)
        scale = declared.guidance if isinstance(declared, Start) else None
        if scale is None:
            return cond
        plain = cond.cond if isinstance(cond, Guided) else cond
        if scale == 1:
            return plain
        first = optree.tree_leaves(plain)[0]
        if isinstance(cond, Guided):
            unconditional = cond.uncond
        else:
            one = self.model.encode([negative])
            pairs = zip(optree.tree_leaves(plain), optree.tree_leaves(one), strict=True)
            # Prompts may be padded to fewer tokens than the model's own length.
            one = trim(self.model, one, next((a.shape[1] for a, b in pairs if a.shape[1:] != b.shape[1:]), None))
            unconditional = optree.tree_map(lambda row: to_device(row, first.device).expand(len(first), *row.shape[1:]), one)
        return Guided(plain, unconditional, torch.full((len(first),), scale, device=first.device))

    def follow(self, rollouts: int) -> None:
        """Move each follower to d it + (1 - d) policy; every rank moves its own shards.

        Args:
            rollouts: number of rollouts made so far.
        """
        for name, follower in self.followers.items():
            decay = follower.decay(rollouts, self.engine.updates)
            if decay == 0:
                copy_adapter(self.engine.module, "default", name)
            else:
                blend_adapter(self.engine.module, "default", name, decay)

    def offload(self) -> None:
        """Move the modules that do not take part in a rollout to the host."""
        for module in self.frozen.values():
            module.offload()

    def onload(self) -> None:
        """Move these modules back to the device."""
        for module in self.frozen.values():
            module.onload()
