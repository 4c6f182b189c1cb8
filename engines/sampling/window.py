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
# Stochastic steps: one set for all samples, or `[B, S]`, those of each sample.
Steps = Collection[int] | Tensor
# (ids of samples that are generated together) -> their stochastic steps
StepsOf = Callable[[Sequence[int]], Steps]


class NoiseIds(NamedTuple):
    """Ids whose noise the samples take at a step, one per sample."""

    recorded: list[int]  # of the step that is recorded
    leading: list[int]  # of the one that the sample goes on with


# (ids of samples that are generated together, index of a step) -> whose noise they take
NoiseOf = Callable[[Sequence[int], int], NoiseIds]

COUNT, INDEX = (1, 2**31), (0, 2**31)
BOUNDS = {
    **{"size": COUNT, "low": INDEX, "high": COUNT, "samples": (2, 2**31)},
    **{"every": COUNT, "stride": COUNT, "decay": (0, 1e6), "decay_from": INDEX},
}


class _Range:
    """A range of the schedule that stochastic steps lie in, and what most windows have in common.

    Args:
        size: Number of stochastic steps.
        low: Index of the first step that the window may cover.
        high: Index after the last one; None is the end of the schedule.
        share_prefix: Compute the steps before the window once per group: its samples start from the same noise, and take
            the same deterministic steps until the window begins (as in BranchGRPO, arXiv 2509.06040).
        tail: How the deterministic steps after the window are taken.
    """

    low: int
    high: int | None
    share_prefix: bool = False
    tail: Tail = NO_TAIL
    draw: Draw = "rollout"
    is_tree: ClassVar[bool] = False  # whether samples share noise
    records_candidates: ClassVar[bool] = False  # whether samples go on from other states than those that are recorded

    def __post_init__(self) -> None:
        check_fields(self, "sampling.window", **BOUNDS)
        refuse_unused(self, "sampling.window.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if self.low < 1 and "share_prefix" in {each.name for each in fields(self)}:  # type: ignore[arg-type]
            yield "share_prefix", "with `sampling.window.low` 0, before which no steps are"

    def range(self, steps: int) -> tuple[int, int]:
        """Return the first step that the window may cover, and the one after the last, of a schedule of `steps` steps."""
        return self.low, steps if self.high is None else self.high

    def count(self, steps: int) -> int:
        """Return the number of stochastic steps of a sample."""
        size: int = self.size  # type: ignore[attr-defined]
        return size

    def places(self, steps: int) -> int:
        """Return the number of places at which the window fits in its range."""
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
        """Return whose noise samples take at each step; None where each takes its own."""
        return None

    def count_compared(self, group: int) -> int:
        """Return the number of consecutive samples that are compared with each other."""
        return group

    def trunk(self, steps: int, group: int) -> int:
        """Return the number of consecutive samples that start from the same noise, where any do."""
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
        """Return the number of steps before every window of a rollout, given one window of it."""
        return self.low if self.differs else min(int(step) for step in chosen)


class _Drawn(_Range):
    """A window whose steps are drawn at random: `place(key, steps, size, low, high)`."""

    place: ClassVar[Callable[..., Collection[int]]]
    size: int

    def steps_of(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps of samples, see `Window`."""
        low, high = self.range(steps)
        same = self.place(key, steps, self.size, low, high)
        if self.draw == "rollout":
            return lambda ids: same

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

    def steps_of(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps of samples, see `Window`."""
        every = range(*self.range(steps))
        return lambda ids: every


@dataclass(frozen=True)
class RandomWindow(_Drawn):
    """Contiguous steps at a random place take noise (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802); the others are ODE steps.

    Args:
        draw: Scope of one draw of the place: rollout (all samples), call (the `micro_batch` samples that are generated
            together, as in Flow-GRPO-Fast's code), group (Flash-GRPO), sample (verl-omni) or run (once per group, and kept
            for the whole run; an older Flow-GRPO-Fast draws it once per GPU).
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
    """Steps drawn one by one take noise, contiguous or not (Flow-Factory, UniRL).

    Args:
        low: Index of the first step that may be drawn.
        draw: Scope of one draw of the steps: rollout (all samples), call (the `micro_batch` samples that are generated
            together), group, sample, or run (once per group, and kept for the whole run).
    """

    kind: ClassVar[str] = "scattered"
    place: ClassVar = staticmethod(sde_steps)
    size: int
    low: int = 0
    high: int | None = None
    draw: Draw = "rollout"


@dataclass(frozen=True)
class MovingWindow(_Range):
    """Contiguous steps take noise that move from noise to data as training goes on (MixGRPO, arXiv 2507.21802).

    At start s the window stays for ceil(every exp(-decay max(0, s - decay_from))) rollouts.

    Args:
        every: Number of rollouts that the window stays at its first position.
        stride: Number of steps that it moves by.
        repeat: Start over after the last position that fits in the range; otherwise the window stays there.
        decay: Rate of the decay of that number, per step.
        decay_from: Start from which on the decay acts.
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

    def steps_of(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps of samples, see `Window`."""
        low, high = self.range(steps)
        moves = {"every": self.every, "stride": self.stride, "decay_from": self.decay_from}
        moved = moving_window(done, steps, self.size, low, high, repeat=self.repeat, decay=self.decay, **moves)
        return lambda ids: moved


class _Tree(_Range):
    """A window whose samples share the first steps of their paths: those of one trunk are the leaves of a tree."""

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
    """Samples that differ in the noise of one window alone are compared with each other (TempFlow-GRPO, arXiv 2508.04324).

    A group consists of trunks, each with its own initial noise and `samples` samples at every place of the window.

    Args:
        size: Number of stochastic steps of a sample.
        samples: Number of samples that are compared: those of one trunk and one place of the window.
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

    def steps_of(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps of samples, see `Window`."""
        places, window = self.places(steps), torch.arange(self.low, self.low + self.size)
        return lambda ids: torch.tensor([i // self.samples % places for i in ids])[:, None] + window


class _NoisyTree(_Tree):
    """A tree whose every step before `high` takes noise."""

    def count(self, steps: int) -> int:
        """Return the number of stochastic steps of a sample."""
        return self.range(steps)[1]

    def range(self, steps: int) -> tuple[int, int]:
        """Return the first stochastic step, and the one after the last."""
        return 0, steps if self.high is None else self.high

    def steps_of(self, key: Key, run: Key, *, done: int, steps: int, group: int) -> StepsOf:
        """Return the stochastic steps of samples, see `Window`."""
        every = range(*self.range(steps))
        return lambda ids: every


@dataclass(frozen=True)
class Splits(_NoisyTree):
    """Every step takes noise, and paths split at some of them: the samples of a tree share the steps before their split.

    Samples share an edge of the tree if they share its noise, and so its bits (BranchGRPO, arXiv 2509.06040).

    Args:
        splits: Indices of the steps at which each path splits, rising.
        children: Number of paths that each splits into.
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
        """Return the first sample that takes the same step as a sample, whose edge of the tree that is."""
        below: int = self.children ** sum(split > step for split in self.splits)
        return number // below * below

    def noise_of(self) -> NoiseOf:
        """Return whose noise samples take at each step: that of the first one that shares the edge."""

        def shared(ids: Sequence[int], step: int) -> NoiseIds:
            first = [self.first_leaf(i, step) for i in ids]
            return NoiseIds(first, first)

        return shared


@dataclass(frozen=True)
class Candidates(_NoisyTree):
    """Every step takes noise; from step `low` on there are several candidates for the next state, and one of them goes on.

    The samples that are compared are at one state at every step, from which each records a candidate of its own. All go on
    with that of the first of them, which is one at random because its noise is independent of everything else.

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
        """Return the number of consecutive samples that are at one state."""
        return self.samples

    def noise_of(self) -> NoiseOf:
        """Return whose noise samples take at each step."""

        def noise(ids: Sequence[int], step: int) -> NoiseIds:
            first = [i // self.samples * self.samples for i in ids]
            return NoiseIds(first if step < self.low else list(ids), first)

        return noise


# `window.steps_of(key, run, done=, steps=, group=)` returns a function of the ids of samples that are generated together:
#   key    key of the rollout's windows
#   run    key of the run's windows, for those that are drawn once
#   done   number of rollouts made so far
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
    """The first recorded steps are trained on, which are the noisiest (Flow-GRPO, whose last step is not trained on).

    Args:
        fraction: Fraction of the recorded steps that is trained on, rounded down, and at least 1 step.
    """

    kind: ClassVar[str] = "first"

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the first steps, else 0, `[B, S]`."""
        return (torch.arange(recorded) < self.count(recorded)).float().expand(batch, -1)


@dataclass(frozen=True)
class RandomRecorded(_Fraction):
    """Recorded steps drawn for each sample and rollout are trained on (DanceGRPO, arXiv 2505.07818).

    Args:
        fraction: Fraction of the recorded steps that is trained on, rounded down, and at least 1 step.
    """

    kind: ClassVar[str] = "random"

    def mask(self, key: Key, batch: int, recorded: int) -> Tensor:
        """Return 1 for the drawn steps, else 0, `[B, S]`; the same on every rank."""
        drawn = uniform(fold_in(key, torch.arange(batch)), (batch, recorded))
        place = torch.argsort(torch.argsort(drawn, dim=1), dim=1)
        return (place < self.count(recorded)).float()


@dataclass(frozen=True)
class StratifiedRecorded:
    """Recorded steps drawn for each sample, some from the first part of them and some from the rest, are trained on.

    Args:
        fraction: Fraction of the recorded steps that the first part is, rounded up.
        first: Number of steps from the first part.
        rest: Number of steps from the others.
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
    """One recorded step of each sample is trained on.

    Args:
        draw: Scope of one draw of the step: sample (each sample has its own) or rollout (all samples have the same).
        odds: Odds of the steps: even, or late (1, 2, 3, ... from the first to the last, as TDM-R1 draws).
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
        return (drawn == drawn.amax(1, keepdim=True)).float()


Trained = AllRecorded | FirstRecorded | RandomRecorded | StratifiedRecorded | OneRecorded
