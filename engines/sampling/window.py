"""Which steps of a rollout take noise, and which of these are trained on."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key, fold_in, uniform
from fluvial.core.sigmas import moving_window, sde_steps, sde_window
from fluvial.engines.choices import refuse_unused
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.sampling.tail import NO_TAIL, Tail

# Scope of one draw of the steps.
Draw = Literal["rollout", "call", "group", "sample", "run"]
# Stochastic steps: one set for all samples, or the steps of each sample, `[B, S]`.
Steps = Collection[int] | Tensor
# (ids of samples that are generated together) -> their stochastic steps
StepsOf = Callable[[Sequence[int]], Steps]


class NoiseIds(NamedTuple):
    """Ids of the noise of a step, one per sample."""

    recorded: list[int]  # ids of the recorded step's noise
    leading: list[int]  # ids of the noise of the step that the sample continues with


# (ids of samples that are generated together, index of a step) -> ids of their noise
NoiseOf = Callable[[Sequence[int], int], NoiseIds]

COUNT, INDEX = (1, 2**31), (0, 2**31)
BOUNDS = {
    **{"size": COUNT, "low": INDEX, "high": COUNT, "samples": (2, 2**31)},
    **{"every": COUNT, "stride": COUNT, "decay": (0, 1e6), "decay_from": INDEX},
}


class _Range:
    """Base of windows: a range of the schedule that contains the stochastic steps.

    Args:
        size: Number of stochastic steps.
        low: Index of the first step that the window may cover.
        high: Index after the last one; None is the end of the schedule.
        share_prefix: Compute the steps before the window once per group: its samples start from the same noise, and take
            the same deterministic steps up to the window (as in BranchGRPO, arXiv 2509.06040).
        tail: How the deterministic steps after the window are taken.
    """

    low: int
    high: int | None
    share_prefix: bool = False
    tail: Tail = NO_TAIL
    draw: Draw = "rollout"
    is_tree: ClassVar[bool] = False  # whether samples share noise
    records_candidates: ClassVar[bool] = False  # whether samples may continue from states that are not recorded

    def __post_init__(self) -> None:
        check_fields(self, "sampling.window", **BOUNDS)
        refuse_unused(self, "sampling.window.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if self.low < 1 and "share_prefix" in {each.name for each in fields(self)}:  # type: ignore[arg-type]
            yield "share_prefix", "with `sampling.window.low` 0, before which no steps are"

    def range(self, steps: int) -> tuple[int, int]:
        """Return the range of steps that the window may cover, [low, high), in a schedule of `steps` steps."""
        return self.low, steps if self.high is None else self.high

    def count(self, steps: int) -> int:
        """Return the number of stochastic steps of a sample."""
        size: int = self.size  # type: ignore[attr-defined]
        return size

    def places(self, steps: int) -> int:
        """Return the number of positions of the window in its range."""
        low, high = self.range(steps)
        return high - low - self.count(steps) + 1

    def check(self, steps: int, group: int) -> None:
        """Raise UsageError unless the window fits the schedule and the group.

        Args:
            steps: number of steps of the schedule.
            group: number of samples per group.
        """
        low, high = self.range(steps)
        if not 0 <= low < high <= steps or not 1 <= self.count(steps) <= high - low:
            raise UsageError(
                f"`sampling.window` has {self.count(steps)} stochastic steps in steps {low} to {high} of {steps}, "
                "expected 0 <= low < high <= steps and 1 <= size <= high - low"
            )
        if self.share_prefix and group < 2:
            raise no_effect("sampling.window.share_prefix", "with `sampling.group` 1")
        if self.draw != "rollout" and self.places(steps) == 1:
            raise no_effect("sampling.window.draw", "with a window that covers its whole range")

    def noise_of(self) -> NoiseOf | None:
        """Return the ids of the noise at each step; None if each sample takes its own."""
        return None

    def count_compared(self, group: int) -> int:
        """Return the number of consecutive samples that are compared with each other."""
        return group

    def trunk(self, steps: int, group: int) -> int:
        """Return the number of consecutive samples that start from the same noise, if any do."""
        return group

    @property
    def shares_start(self) -> bool:
        """Whether samples start from the same noise."""
        return self.share_prefix

    @property
    def differs(self) -> bool:
        """Whether the samples of a rollout may have different steps."""
        return self.draw != "rollout"

    def count_shared_steps(self, chosen: Steps) -> int:
        """Return the number of steps before all windows of a rollout, given one of them."""
        return self.low if self.differs else min(int(step) for step in chosen)


class _Drawn(_Range):
    """A window of random steps, drawn by `place(key, steps, size, low, high)`."""

    place: ClassVar[Callable[..., Collection[int]]]
    size: int

    def choose_steps(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps as a function of sample ids, see `Window`."""
        low, high = self.range(steps)
        shared = self.place(key, steps, self.size, low, high)
        if self.draw == "rollout":
            return lambda ids: shared

        def place(key: Key, number: int) -> list[int]:
            return list(self.place(fold_in(key, number), steps, self.size, low, high))

        if self.draw == "call":
            return lambda ids: torch.tensor([place(key, ids[0])] * len(ids))
        root, size = run if self.draw == "run" else key, 1 if self.draw == "sample" else group
        return lambda ids: torch.tensor([place(root, i // size) for i in ids])


@dataclass(frozen=True)
class AllSteps(_Range):
    """Every step of a range takes noise.

    Args:
        low: Index of the first stochastic step.
    """

    kind: ClassVar[str] = "all"
    low: int = 0
    high: int | None = None

    def count(self, steps: int) -> int:
        """Return the number of steps of the range."""
        low, high = self.range(steps)
        return high - low

    def choose_steps(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps as a function of sample ids, see `Window`."""
        every = range(*self.range(steps))
        return lambda ids: every


@dataclass(frozen=True)
class RandomWindow(_Drawn):
    """Contiguous steps from a random start take noise (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802); the others are ODE steps.

    Args:
        draw: Scope of one draw of the start: rollout (all samples), call (the `micro_batch` samples that are generated
            together, as in Flow-GRPO-Fast's code), group (Flash-GRPO), sample (verl-omni) or run (once per group, for the
            whole run; an older Flow-GRPO-Fast draws once per GPU).
    """

    kind: ClassVar[str] = "random"
    place: ClassVar = staticmethod(sde_window)
    size: int
    low: int = 0
    high: int | None = None
    draw: Draw = "rollout"
    share_prefix: bool = False
    tail: Tail = NO_TAIL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.differs and self.tail != NO_TAIL:
            raise UsageError("sampling.window.draw", self.draw, "rollout", "the tail needs one window per rollout")


@dataclass(frozen=True)
class ScatteredSteps(_Drawn):
    """Random steps, contiguous or not, take noise (Flow-Factory, UniRL).

    Args:
        low: Index of the first step that may be drawn.
        draw: Scope of one draw of the steps: rollout (all samples), call (the `micro_batch` samples that are generated
            together), group, sample, or run (once per group, for the whole run).
    """

    kind: ClassVar[str] = "scattered"
    place: ClassVar = staticmethod(sde_steps)
    size: int
    low: int = 0
    high: int | None = None
    draw: Draw = "rollout"


@dataclass(frozen=True)
class MovingWindow(_Range):
    """A window of contiguous steps takes noise, and moves from noise to data during training (MixGRPO, arXiv 2507.21802).

    A window that starts at step s stays for ceil(every exp(-decay max(0, s - decay_from))) rollouts.

    Args:
        every: Number of rollouts at a position, without decay.
        stride: Number of steps that the window moves by.
        repeat: Restart after the last position in the range; otherwise the window stays there.
        decay: Exponential decay of the number of rollouts at a position, per step of s.
        decay_from: First step s from which the number of rollouts decays.
    """

    kind: ClassVar[str] = "moving"
    size: int
    low: int = 0
    high: int | None = None
    every: int = 1
    stride: int = 1
    repeat: bool = True
    decay: float = 0.0
    decay_from: int = 0
    share_prefix: bool = False
    tail: Tail = NO_TAIL

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        yield from super().unused()
        if not self.decay:
            yield "decay_from", "with `sampling.window.decay` 0"

    def check(self, steps: int, group: int) -> None:
        """Raise UsageError unless the window fits the schedule and the group."""
        super().check(steps, group)
        if self.places(steps) == 1:
            raise UsageError("sampling.window", self.kind, "all", "it covers its whole range and cannot move")

    def choose_steps(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps as a function of sample ids, see `Window`."""
        low, high = self.range(steps)
        moves = {"every": self.every, "stride": self.stride, "decay_from": self.decay_from}
        moved = moving_window(done, steps, self.size, low, high, repeat=self.repeat, decay=self.decay, **moves)
        return lambda ids: moved


class _Tree(_Range):
    """A window whose samples share the first steps of their paths: the samples of a trunk are the leaves of a tree."""

    is_tree: ClassVar[bool] = True
    shares_start: ClassVar[bool] = True

    leaves: ClassVar[Callable[..., int]]  # (self, steps) -> number of consecutive samples that are the leaves of one tree

    def check(self, steps: int, group: int) -> None:
        """Raise UsageError unless the window fits the schedule, and a group divides into trees."""
        super().check(steps, group)
        if group % self.leaves(steps):
            leaves = self.leaves(steps)
            raise UsageError("sampling.group", group, f"a multiple of {leaves}", f"a tree has {leaves} samples")

    def count_compared(self, group: int) -> int:
        """Return the number of consecutive samples that are compared with each other."""
        return self.samples  # type: ignore[attr-defined]

    def trunk(self, steps: int, group: int) -> int:
        """Return the number of consecutive samples that start from the same noise."""
        return self.leaves(steps)


@dataclass(frozen=True)
class Branches(_Tree):
    """Compares samples that differ only in the noise of one window (TempFlow-GRPO, arXiv 2508.04324).

    A group consists of trunks, each with its own initial noise and `samples` samples per position of the window.

    Args:
        size: Number of stochastic steps of a sample.
        samples: Number of compared samples, which share a trunk and a position of the window.
    """

    kind: ClassVar[str] = "branches"
    differs: ClassVar[bool] = True
    size: int
    samples: int
    low: int = 0
    high: int | None = None

    def leaves(self, steps: int) -> int:
        """Return the number of consecutive samples that are the leaves of one tree."""
        return self.samples * self.places(steps)

    def choose_steps(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps as a function of sample ids, see `Window`."""
        places, window = self.places(steps), torch.arange(self.low, self.low + self.size)
        return lambda ids: torch.tensor([i // self.samples % places for i in ids])[:, None] + window


class _NoisyTree(_Tree):
    """A tree in which every step before `high` takes noise."""

    def count(self, steps: int) -> int:
        """Return the number of stochastic steps of a sample."""
        return self.range(steps)[1]

    def range(self, steps: int) -> tuple[int, int]:
        """Return the range of the stochastic steps, [0, high)."""
        return 0, steps if self.high is None else self.high

    def choose_steps(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps as a function of sample ids, see `Window`."""
        every = range(*self.range(steps))
        return lambda ids: every


@dataclass(frozen=True)
class Splits(_NoisyTree):
    """Every step takes noise, and paths split at some steps: the samples of a tree share the steps before their split.

    Samples on the same edge of the tree share its noise, and so its bits (BranchGRPO, arXiv 2509.06040).

    Args:
        splits: Indices of the steps at which each path splits, in increasing order.
        children: Number of paths after a split, per path.
        high: Index after the last stochastic step; None is the end of the schedule.
    """

    kind: ClassVar[str] = "splits"
    low: ClassVar[int] = 0  # type: ignore[misc]
    splits: tuple[int, ...] = (0, 3, 6, 9)
    children: int = 2
    high: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "sampling.window", children=(2, 2**31), high=COUNT)
        rising = all(a < b for a, b in pairwise(self.splits))
        if not self.splits or self.splits[0] < 0 or not rising:
            raise UsageError("sampling.window.splits", self.splits, "rising indices of steps, at least one")

    def check(self, steps: int, group: int) -> None:
        """Raise UsageError unless the splits are steps of the window, and a group divides into trees."""
        super().check(steps, group)
        end = self.range(steps)[1]
        if self.splits[-1] >= end:
            raise UsageError("sampling.window.splits", self.splits, f"steps below {end}")

    def leaves(self, steps: int) -> int:
        """Return the number of consecutive samples that are the leaves of one tree."""
        return self.children ** len(self.splits)

    def count_compared(self, group: int) -> int:
        """Return the number of consecutive samples that are compared with each other."""
        return self.leaves(0)

    def first_leaf(self, number: int, step: int) -> int:
        """Return the first sample on the same edge of the tree as a sample at a step."""
        below: int = self.children ** sum(split > step for split in self.splits)
        return number // below * below

    def noise_of(self) -> NoiseOf:
        """Return the ids of the noise at each step: the first sample on the same edge."""

        def shared(ids: Sequence[int], step: int) -> NoiseIds:
            first = [self.first_leaf(i, step) for i in ids]
            return NoiseIds(first, first)

        return shared


@dataclass(frozen=True)
class Candidates(_NoisyTree):
    """Every step takes noise; from step `low` on a state has several candidates for the next one, and continues with one.

    The compared samples share their state at every step, and each records its own candidate for the next. All continue with
    the first sample's candidate, which is a random choice because its noise is independent of everything else.

    Args:
        samples: Number of candidates.
        low: Index of the first step with candidates.
    """

    kind: ClassVar[str] = "candidates"
    records_candidates: ClassVar[bool] = True
    samples: int = 4
    low: int = 0
    high: int | None = None

    def check(self, steps: int, group: int) -> None:
        """Raise UsageError unless the window fits the schedule, and a group divides into sets of candidates."""
        super().check(steps, group)
        end = self.range(steps)[1]
        if self.low >= end:
            raise UsageError("sampling.window.low", self.low, f"below {end}")

    def leaves(self, steps: int) -> int:
        """Return the number of consecutive samples that share their states."""
        return self.samples

    def noise_of(self) -> NoiseOf:
        """Return the ids of the noise at each step."""

        def noise(ids: Sequence[int], step: int) -> NoiseIds:
            first = [i // self.samples * self.samples for i in ids]
            return NoiseIds(first if step < self.low else list(ids), first)

        return noise


# `window.choose_steps(key, run, done=, steps=, group=)` returns the stochastic steps as a function of sample ids:
#   key    key of the rollout's windows
#   run    key of windows that are drawn once per run
#   done   number of rollouts so far
#   steps  number of steps of the schedule
#   group  number of samples per group
Window = AllSteps | RandomWindow | ScatteredSteps | MovingWindow | Branches | Splits | Candidates


@dataclass(frozen=True)
class AllRecorded:
    """Every recorded step is trained on."""

    kind: ClassVar[str] = "all"

    def count(self, recorded: int) -> int:
        """Return how many of a sample's recorded steps are trained on."""
        return recorded

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the recorded steps of each sample that are trained on, else 0, `[B, S]`; the same on every rank."""
        return torch.ones(batch, recorded)


@dataclass(frozen=True)
class _Fraction:
    """A fraction of the recorded steps is trained on."""

    fraction: float

    def __post_init__(self) -> None:
        check_fields(self, "trained", fraction=(1e-6, 1 - 1e-6))

    def count(self, recorded: int) -> int:
        """Return how many of a sample's recorded steps are trained on."""
        return max(math.floor(self.fraction * recorded + 1e-9), 1)  # 0.6 x 15 is 8.999... in floating point


@dataclass(frozen=True)
class FirstRecorded(_Fraction):
    """The first recorded steps, the noisiest, are trained on (Flow-GRPO, which does not train on the last step).

    Args:
        fraction: Fraction of the recorded steps that is trained on, rounded down, but at least 1 step.
    """

    kind: ClassVar[str] = "first"

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the first steps, else 0, `[B, S]`."""
        return (torch.arange(recorded) < self.count(recorded)).float().expand(batch, -1)


@dataclass(frozen=True)
class RandomRecorded(_Fraction):
    """Random recorded steps are trained on, drawn per sample and rollout (DanceGRPO, arXiv 2505.07818).

    Args:
        fraction: Fraction of the recorded steps that is trained on, rounded down, but at least 1 step.
    """

    kind: ClassVar[str] = "random"

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the drawn steps, else 0, `[B, S]`; the same on every rank."""
        drawn = uniform(fold_in(key, torch.arange(batch)), (batch, recorded))
        place = torch.argsort(torch.argsort(drawn, dim=1), dim=1)
        return (place < self.count(recorded)).float()


@dataclass(frozen=True)
class StratifiedRecorded:
    """Random recorded steps are trained on, drawn per sample: some from the first part of the steps, some from the rest.

    Args:
        fraction: Length of the first part as a fraction of the recorded steps, rounded up.
        first: Number of steps from the first part.
        rest: Number of steps from the rest.
    """

    kind: ClassVar[str] = "stratified"
    fraction: float = 0.6
    first: int = 2
    rest: int = 2

    def __post_init__(self) -> None:
        check_fields(self, "trained", fraction=(1e-6, 1 - 1e-6), first=COUNT, rest=COUNT)

    def count(self, recorded: int) -> int:
        """Return how many of a sample's recorded steps are trained on."""
        edge = math.ceil(self.fraction * recorded - 1e-9)
        return min(self.first, edge) + min(self.rest, recorded - edge)

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the drawn steps, else 0, `[B, S]`; the same on every rank."""
        drawn = uniform(fold_in(key, torch.arange(batch)), (batch, recorded))
        edge = math.ceil(self.fraction * recorded - 1e-9)
        parts = (drawn[:, :edge], self.first), (drawn[:, edge:], self.rest)
        return torch.cat([(part.argsort(1).argsort(1) < count).float() for part, count in parts], dim=1)


@dataclass(frozen=True)
class OneRecorded:
    """One random recorded step per sample is trained on.

    Args:
        draw: Scope of one draw of the step: sample (each sample has its own) or rollout (all samples have the same).
        odds: Odds of the steps: even, or late (1, 2, 3, ... from the first to the last, as in TDM-R1).
    """

    kind: ClassVar[str] = "one"
    draw: Literal["sample", "rollout"] = "sample"
    odds: Literal["even", "late"] = "even"

    def __post_init__(self) -> None:
        check_fields(self, "trained")

    def count(self, recorded: int) -> int:
        """Return how many of a sample's recorded steps are trained on."""
        return 1

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the drawn step, else 0, `[B, S]`; the same on every rank."""
        samples = torch.zeros(batch, dtype=torch.int64) if self.draw == "rollout" else torch.arange(batch)
        drawn = uniform(fold_in(key, samples), (batch, recorded))
        if self.odds == "late":  # the largest u^(1/n) is at a step with odds proportional to n
            drawn = drawn ** (1 / torch.arange(1, recorded + 1))
        return torch.nn.functional.one_hot(drawn.argmax(1), recorded).float()  # the first of equal draws


Trained = AllRecorded | FirstRecorded | RandomRecorded | StratifiedRecorded | OneRecorded
