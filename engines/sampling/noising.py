"""Noise levels of clean samples: their number and distribution."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core.checks import check_fields, per_sample
from fluvial.core.flow_matching import interpolate
from fluvial.core.random import Key, fold_in, normal, uniform
from fluvial.engines.errors import UsageError
from fluvial.engines.streams import Stream
from fluvial.models import Prediction, Schedule
from fluvial.models.host_values import to_device

Drawn = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class _Steps:
    """Levels of steps of the sampling schedule."""

    highest: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "noising.levels", highest=(1, 2**31), skip=(0, 2**31))
        if self.highest is not None and self.skip >= self.highest:
            raise UsageError("noising.levels.skip", self.skip, f"less than `noising.levels.highest` {self.highest}")


@dataclass(frozen=True)
class ScheduleLevels(_Steps):
    """Distinct steps of the sampling schedule, drawn at random.

    Args:
        highest: Number of steps that levels are drawn from, starting at the noisiest; None is all.
        skip: Number of the noisiest steps that are left out.
    """

    kind: ClassVar[str] = "schedule"

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, with their timesteps, see `Levels`."""
        steps = (self.highest or len(schedule.timesteps)) - self.skip
        step = self.skip + torch.argsort(uniform(keys, (_batch(keys), steps)), dim=1)[:, :each]
        return schedule.levels[step], schedule.timesteps[step]


@dataclass(frozen=True)
class StratifiedLevels(_Steps):
    """One step from each of `each` equal parts of the sampling schedule, as in the code of AWM and of Flow-Factory.

    Args:
        highest: Number of steps that levels are drawn from, starting at the noisiest; None is all.
        skip: Number of the noisiest steps that are left out (AWM's code leaves out the first, which is pure noise).
    """

    kind: ClassVar[str] = "stratified"

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, with their timesteps, see `Levels`."""
        end = self.highest or len(schedule.timesteps)
        bounds = to_device(torch.linspace(self.skip, end, each + 1).long(), schedule.timesteps.device)
        step = bounds[:-1] + (uniform(keys, (_batch(keys), each)) * bounds.diff()).long()
        return schedule.levels[step], schedule.timesteps[step]


@dataclass(frozen=True)
class ContinuousLevels:
    """Levels uniform along the sampling schedule, interpolated between its steps, and so as dense as these."""

    kind: ClassVar[str] = "continuous"

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, without timesteps, see `Levels`."""
        steps = len(schedule.timesteps)
        place = uniform(keys, (_batch(keys), each)) * steps
        below = place.long().clamp(max=steps - 1)
        return torch.lerp(schedule.levels[below], schedule.levels[below + 1], place - below), None


@dataclass(frozen=True)
class LogitNormalLevels:
    """Levels that are the sigmoid of normal draws of variance 1 (arXiv 2403.03206).

    Args:
        mean: Mean of the normal; log s acts like a schedule's shift s, sigma -> s sigma / (1 + (s - 1) sigma).
    """

    kind: ClassVar[str] = "logit_normal"
    mean: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "noising.levels", mean=(-math.inf, math.inf))

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, without timesteps, see `Levels`."""
        return torch.sigmoid(normal(keys, (_batch(keys), each)) + self.mean), None


@dataclass(frozen=True)
class UniformLevels:
    """Levels uniform between two bounds, independent of the sampling schedule.

    Args:
        low: Smallest noise level.
        high: Largest noise level.
    """

    kind: ClassVar[str] = "uniform"
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "noising.levels", low=(0, 1), high=(0, 1))
        if self.low >= self.high:
            raise UsageError("noising.levels.low", self.low, f"less than `noising.levels.high` {self.high}")

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, without timesteps, see `Levels`."""
        return self.low + (self.high - self.low) * uniform(keys, (_batch(keys), each)), None


@dataclass(frozen=True)
class ShiftedLevels(UniformLevels):
    """Uniform levels with a schedule's shift, u -> s u / (1 + (s - 1) u), clamped to two bounds.

    Self-Forcing compares teacher and fake at these levels, with shift 5 (arXiv 2506.08009).

    Args:
        low: Smallest noise level.
        high: Largest noise level.
        shift: Shift s; above 1, high levels are more frequent.
    """

    kind: ClassVar[str] = "shifted"
    low: float = 0.02
    high: float = 0.98
    shift: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "noising.levels", shift=(1e-3, 1e3))

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Return `each` levels per sample, without timesteps, see `Levels`."""
        u = uniform(keys, (_batch(keys), each))
        return (self.shift * u / (1 + (self.shift - 1) * u)).clamp(self.low, self.high), None


@dataclass(frozen=True)
class AutoLevels:
    """Continuous levels, or distinct steps of the schedule for a model that accepts only its schedule's levels."""

    kind: ClassVar[str] = "auto"

    def draw(self, keys: Key, schedule: Schedule, each: int) -> Drawn:
        """Raise AssertionError: `NoisingConfig.choose_levels` has not been called."""
        raise AssertionError("levels are auto, and none are chosen")


# `levels.draw(keys, schedule, each)` returns levels `[B, each]`, and timesteps; None if the model derives them from levels:
#   keys      key per sample for the levels, `[B]`
#   schedule  T+1 levels and T timesteps, on the keys' device
Levels = (
    ScheduleLevels | StratifiedLevels | ContinuousLevels | LogitNormalLevels | UniformLevels | ShiftedLevels | AutoLevels
)


@dataclass(frozen=True)
class NoisingConfig:
    """Noise levels at which clean samples are trained on, for methods that need no recorded steps.

    Args:
        each: Number of noise levels per sample, each with its own noise.
        levels: Distribution of the levels: schedule (distinct steps of the sampling schedule), stratified (one step from
            each of `each` equal parts of it), continuous (uniform along it), logit_normal, uniform, shifted, or auto
            (continuous if the model accepts any level, else schedule).
        draw: Scope of one draw of the levels: sample, call (`micro_batch` consecutive samples, as in AWM's code) or rollout
            (all samples; a group then also shares its noise, at all levels, as in DGPO, arXiv 2510.08425). Otherwise each
            sample has its own noise.
    """

    each: int = 4
    levels: Levels = field(default_factory=ScheduleLevels)
    draw: Literal["sample", "call", "rollout"] = "sample"

    def __post_init__(self) -> None:
        check_fields(self, each=(1, 2**31))
        self.check_steps(2**31)

    def check_steps(self, steps: int) -> None:
        """Raise UsageError unless a schedule of `steps` steps has enough levels."""
        levels = self.levels
        if not isinstance(levels, _Steps):
            return
        if levels.highest is not None and levels.highest > steps:
            raise UsageError("noising.levels.highest", levels.highest, f"at most the {steps} steps of the schedule")
        end = steps if levels.highest is None else levels.highest
        if levels.skip >= end:
            raise UsageError("noising.levels.skip", levels.skip, f"less than the {end} steps that levels are drawn from")
        if isinstance(levels, ScheduleLevels) and self.each > end - levels.skip:
            raise UsageError("noising.each", self.each, f"at most {end - levels.skip}, the steps that levels are drawn from")

    def choose_levels(self, *, on_schedule: bool) -> "NoisingConfig":
        """Return the config with levels auto resolved.

        Args:
            on_schedule: whether the model accepts only the levels of its schedule.
        """
        if not isinstance(self.levels, AutoLevels):
            return self
        return replace(self, levels=ScheduleLevels() if on_schedule else ContinuousLevels())

    @property
    def is_shared(self) -> bool:
        """Whether all samples share their levels, and the samples of a group also their noise."""
        return self.draw == "rollout"


def add_noise(x0: Tensor, noise: Tensor, level: Tensor, *, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return samples noised to levels `[B]` or `[B, R]`, and the model's regression targets, `[B, *event]` each."""
    if prediction == "velocity":
        return interpolate(x0, noise, level), noise - x0
    alpha_bar = per_sample(level, x0)
    return torch.sqrt(alpha_bar) * x0 + torch.sqrt(1 - alpha_bar) * noise, noise


def knows_its_schedule_only(prediction: Prediction, *, recorded: bool) -> bool:
    """Return whether a model accepts only the levels of its schedule: it predicts epsilon, or is replayed."""
    return prediction == "epsilon" or recorded


def draw_levels(keys: Key, schedule: Schedule, config: NoisingConfig) -> Drawn:
    """Return noise levels `[B, each]`, and timesteps for the model; None if it derives them from the levels.

    Levels are `[B, each, R]` for samples `[B, R, ...]` whose rows have their own.

    Raises:
        UsageError: rows have their own levels, and `config.levels` does not draw steps of the schedule.
    """
    assert isinstance(keys.low, Tensor)
    on_device = Schedule(*(to_device(tensor, keys.low.device) for tensor in schedule))
    if on_device.levels.ndim == 2 and not isinstance(config.levels, _Steps):
        hint = "the pieces of a sample have their own levels, which are defined only at the steps of the schedule"
        raise UsageError("noising.levels", config.levels.kind, "schedule or stratified", hint)
    return config.levels.draw(fold_in(keys, Stream.LEVELS), on_device, config.each)


def _batch(keys: Key) -> int:
    assert isinstance(keys.low, Tensor)
    return len(keys.low)
