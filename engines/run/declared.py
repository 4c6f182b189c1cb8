"""Declarations of a method: the networks beside the policy, and what a rollout records."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form
from fluvial.engines.errors import UsageError

# (v, rows, loss settings) -> (loss of each row, [P]; NamedTuple of diagnostics, [P] each)
Loss = Callable[[Tensor, Any, Any], tuple[Tensor, Any]]


class Record(NamedTuple):
    """Record of a rollout's stochastic steps, besides x, x_next and the log-probability."""

    velocity: bool = False  # the prediction too
    form: Form | None = None  # form of the log-probability, if not `rollout.form`


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
