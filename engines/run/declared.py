"""Declarations of a method: the networks beside the policy."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.errors import UsageError, no_effect
from fluvial.models.lora_files import is_lora

# (v, rows) -> (loss of each row, [P]; NamedTuple of diagnostics, [P] each)
Loss = Callable[[Tensor, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Follower:
    """A network that lags behind a trained one, as a separate LoRA adapter: follower <- d follower + (1 - d) network.

    Args:
        decay: `(rollouts, updates) -> d`, with the numbers so far; called after each batch.
        samples_from: number of updates after which the follower generates the rollouts; None: the policy generates them.
        network: name of the network that it follows.
    """

    decay: Callable[[int, int], float]
    samples_from: int | None = None
    network: str = "policy"

    def __post_init__(self) -> None:
        if not callable(self.decay):
            raise UsageError(f"Follower has decay {self.decay!r}, expected a function of (rollouts, updates)")


@dataclass(frozen=True)
class Start:
    """The policy that training starts from: the reference.

    Args:
        guidance: scale of classifier-free guidance; None is that of the update.
    """

    guidance: float | None = None


@dataclass(frozen=True)
class Before:
    """The policy before the first update on a batch; with one update per batch it needs no forward pass."""


@dataclass(frozen=True)
class Base:
    """The model's base weights, without an adapter: the teacher in self-distillation.

    Args:
        guidance: scale of classifier-free guidance; None is that of the update.
    """

    guidance: float | None = None


@dataclass(frozen=True)
class Teacher:
    """Another model of the same architecture, without gradient.

    Args:
        weights: folder of its weights, or file or folder of an adapter for the weights that training starts from.
        guidance: scale of classifier-free guidance; None is that of the update.
    """

    weights: Path | None
    guidance: float | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the teacher is an adapter of the policy's module, and not a separate module."""
        return self.weights is not None and is_lora(self.weights)


@dataclass(frozen=True)
class BySource:
    """One prediction by several teachers, each for the samples whose prompts come from its source.

    Args:
        teachers: teacher of each source.
    """

    teachers: Mapping[str, Teacher]

    def name_members(self, name: str) -> dict[str, str]:
        """Return the network name of each teacher, by source; `name` is that of their prediction."""
        return {source: f"{name}_{number}" for number, source in enumerate(self.teachers)}


@dataclass(frozen=True)
class Trained:
    """A second trained network (`run.update(network=...)`), initialised as the model without adapters.

    It is an adapter beside the policy's, or with full fine-tuning a separate module.

    Args:
        optimizer: optimizer of the network.
        guidance: scale of classifier-free guidance.
        head: add a trained head: a number per sample from the output of the middle block, in `rows.predictions["head"]`. It
            reads a single forward pass, so such a network has no guidance.
    """

    optimizer: OptimizerConfig
    guidance: float | None = 1.0
    head: bool = False

    def problems(self, name: str) -> Iterator[UsageError]:
        """Yield errors of optimizer settings without a meaning here; `name` is the field of the optimizer."""
        hint = "of a second network, whose number of updates is not planned"
        for field in self.optimizer.planned_fields:
            expected = "constant" if field == "schedule" else "a number of updates"
            yield UsageError(f"{name}.{field}", getattr(self.optimizer, field), expected, hint)
        if self.optimizer.ema_decay:
            yield no_effect(f"{name}.ema_decay", "of a second network, whose moving average nothing reads")


@dataclass(frozen=True)
class SameNetwork:
    """Another network of the method with a different guidance scale.

    Args:
        network: name of that network.
        guidance: scale of classifier-free guidance.
    """

    network: str
    guidance: float


Network = Follower | Start | Before | Base | Teacher | BySource | Trained | SameNetwork
Networks = dict[str, Network]  # by the name of their predictions in rows


@dataclass(frozen=True)
class Ramp:
    """Decay d of a follower after n updates: start while n < delay, then min(start + rise (n - delay), cap).

    Args:
        start: Decay of the first updates; 0 follows the policy at once.
        rise: Growth of the decay per update after the delay.
        cap: Largest decay, below 1.
        delay: Number of updates before the decay begins to rise.
    """

    start: float = 0.0
    rise: float = 0.0
    cap: float = 0.999
    delay: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "decay", start=(0, 0.999999), rise=(0, 1), cap=(0, 0.999999), delay=(0, math.inf))

    def compute_decay(self, rollouts: int, updates: int) -> float:
        """Return d after a number of rollouts and updates."""
        return compute_ramp(rollouts, updates, rise=self.rise, cap=self.cap, start=self.start, delay=self.delay)


def compute_ramp(rollouts: int, updates: int, *, rise: float, cap: float, start: float = 0.0, delay: int = 0) -> float:
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
        check_fields(self, "old", cap=(0, 1), rise=(0, math.inf), delay=(0, math.inf), every=(1, 2**31))
        if self.cap == 1:
            raise UsageError("`old.cap` is 1, and an old policy with decay 1 never learns: use below 1")

    def compute_decay(self, rollouts: int, updates: int) -> float:
        """Return d, the weight of the old policy, after a number of rollouts and updates."""
        if rollouts % self.every:
            return 1.0
        done = updates if self.unit == "updates" else rollouts
        return compute_ramp(rollouts, done, rise=self.rise, cap=self.cap, delay=self.delay)


OldPolicy = NoOld | LinearOld


def parse_teachers(folders: Sequence[str], guidance: Sequence[str]) -> Teacher | BySource:
    """Return the teacher of a folder, or those of several sources from `SOURCE=FOLDER` each.

    Args:
        folders: as `Teacher` takes them.
        guidance: scale of all, or `SOURCE=SCALE` of some.

    Raises:
        UsageError: a source is repeated, or mixed with a folder without one; a scale is not a number, or belongs to no
            teacher.
    """
    by_source, scales = _split_sources("teacher", folders), dict[str, float]()
    for source, word in _split_sources("guidance", guidance).items():
        try:
            scales[source] = float(word)
        except ValueError:
            scales[source] = math.nan
        if not 0 <= scales[source] < math.inf:
            raise UsageError("guidance", word, "a scale of at least 0, alone or as SOURCE=SCALE")
        if source and source not in by_source:
            raise UsageError("guidance", source, f"a source of a teacher: {', '.join(filter(None, by_source)) or 'none'}")
    if "" in by_source and len(by_source) > 1:
        raise UsageError("teacher", by_source[""], "SOURCE=FOLDER, like the others")
    teachers = {source: Teacher(Path(folder), scales.get(source, scales.get(""))) for source, folder in by_source.items()}
    if teachers and "" not in teachers:
        return BySource(teachers)
    return teachers.get("", Teacher(None))


def _split_sources(field: str, words: Sequence[str]) -> dict[str, str]:
    """Return the value of each source; the value of a word without a source has an empty name."""
    values = dict[str, str]()
    for word in words:
        source, separator, value = ("", "", "") if Path(word).exists() else word.partition("=")
        source, value = (source, value) if separator else ("", word)
        if source in values:
            raise UsageError(field, word, "one for all, or SOURCE=VALUE once per source")
        values[source] = value
    return values


def list_single(networks: Networks) -> Networks:
    """Return the networks with each teacher of a `BySource` under a separate name."""
    single: Networks = {}
    for name, network in networks.items():
        if isinstance(network, BySource):
            single |= {member: network.teachers[source] for source, member in network.name_members(name).items()}
        else:
            single[name] = network
    return single


def find_heads(networks: Networks) -> set[str]:
    """Return the names of the networks with a head."""
    return {name for name, network in networks.items() if isinstance(network, Trained) and network.head}


def find_followers(networks: Networks) -> dict[str, Follower]:
    """Return the followers among the networks, by name."""
    return {name: network for name, network in networks.items() if isinstance(network, Follower)}
