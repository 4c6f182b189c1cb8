"""Networks beside the policy: what a method declares, and what a run builds of it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import optree
import torch
from torch import nn

from fluvial.core.checks import check_fields
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.errors import UsageError
from fluvial.models import Cond, DiffusionModel
from fluvial.models.guidance import Guided
from fluvial.models.host_values import to_device
from fluvial.models.lora import blend_adapter, copy_adapter, use_adapter
from fluvial.models.padding import trimmed

START = "start"  # adapter that training started from, where that is not a new one


@dataclass(frozen=True)
class Follower:
    """A policy that lags behind the trained one, as a LoRA adapter of its own: it <- d it + (1 - d) policy.

    Args:
        decay: `(rollouts, updates) -> d`, of the numbers made so far; called after each rollout.
        samples_from: number of updates from which on it makes the rollouts; None: the policy makes them.
    """

    decay: Callable[[int, int], float]
    samples_from: int | None = None


@dataclass(frozen=True)
class Start:
    """The policy that training starts from: the reference.

    Args:
        guidance: its own scale of classifier-free guidance; None is that of the update.
    """

    guidance: float | None = None


@dataclass(frozen=True)
class Before:
    """The policy before the first update on a batch; with one update per batch it costs no forward pass."""


@dataclass(frozen=True)
class Teacher:
    """Another model of the same architecture, without gradient.

    Args:
        weights: folder of its weights.
    """

    weights: Path | None


Network = Follower | Start | Before | Teacher
Networks = dict[str, Network]  # by the name under which rows hold their predictions


def ramp(rollouts: int, updates: int, *, rise: float, cap: float, start: float = 0.0, delay: int = 0) -> float:
    """Return a follower's decay d after n updates: start while n < delay, then min(start + rise (n - delay), cap)."""
    return start if updates < delay else min(start + rise * (updates - delay), cap)


@dataclass(frozen=True)
class NoOld:
    """The old policy is the current one."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearOld:
    """The old policy follows the current one after each rollout: old <- d old + (1 - d) policy.

    After n rollouts or updates d is 0 while n < delay, then min(rise (n - delay), cap).

    Args:
        rise: Growth of the decay d per n.
        cap: Largest decay d, below 1.
        delay: Number n before d grows.
        every: Number of rollouts between two updates of the old policy.
        unit: What n counts: rollouts, or optimizer updates (as DiffusionNFT's code does, whose OCR run makes two per
            rollout).
    """

    kind: ClassVar[str] = "linear"
    rise: float = 0.001
    cap: float = 0.5
    delay: int = 0
    every: int = 1
    unit: Literal["rollouts", "updates"] = "rollouts"

    def __post_init__(self) -> None:
        check_fields(self, "objective.old", cap=(0, 1), rise=(0, math.inf), delay=(0, math.inf), every=(1, 2**31))
        if self.cap == 1:
            raise UsageError("`objective.old.cap` is 1, and an old policy with decay 1 never learns: use below 1")

    def decay(self, rollouts: int, updates: int) -> float:
        """Return d, the share of the old policy that stays after a number of rollouts and updates."""
        if rollouts % self.every:
            return 1.0
        done = updates if self.unit == "updates" else rollouts
        return ramp(rollouts, done, rise=self.rise, cap=self.cap, delay=self.delay)


OldPolicy = NoOld | LinearOld


def find_followers(networks: Networks) -> dict[str, Follower]:
    """Return the followers among the networks, by name."""
    return {name: network for name, network in networks.items() if isinstance(network, Follower)}


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
            one = trimmed(self.model, one, next((a.shape[1] for a, b in pairs if a.shape[1:] != b.shape[1:]), None))
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
