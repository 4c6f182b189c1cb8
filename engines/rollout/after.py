"""The steps after the window of stochastic ones, which may be fewer and of higher order (MixGRPO-Flash)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import check_fields, per_sample
from fluvial.core.types import Samples
from fluvial.models import Schedule

# Called with a sample, its prediction and the step.
Observer = Callable[[Tensor, Tensor, int], None]


@dataclass(frozen=True)
class AfterWindow:
    """How the deterministic steps after the window are taken (MixGRPO-Flash, arXiv 2507.21802).

    Args:
        solver: Solver of these steps: euler, or dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095, whose first step takes in the
            clean estimate of the window's last one).
        fraction: Fraction of these steps that is taken, at levels that are spaced again: floor(fraction (n + 1)) - 1 of n
            steps, and at least `least`.
        least: Least number of these steps; 0 as in the code of MixGRPO-Flash, which decodes a noisy sample after the last
            windows of its schedule.
    """

    solver: Literal["euler", "dpmpp_2m"] = "euler"
    fraction: float = 1.0
    least: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "rollout.after", fraction=(1e-6, 1), least=(0, 2**31))


class Estimate(NamedTuple):
    """The clean estimate of the step before, x - sigma v."""

    level: float
    clean: Samples


class Noted:
    """A velocity that remembers the clean estimate of its last call, which the next step of a multistep solver takes in.

    Args:
        velocity: prediction of the model, v = velocity(x, level `[B]`, step).
        observe: function that is called with what each call took and returned.
    """

    def __init__(self, velocity: Callable[[Tensor, Tensor, int], Tensor], observe: Observer | None = None) -> None:
        self.velocity, self.observe = velocity, observe
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, level: Tensor, step: int) -> Tensor:
        """Return the prediction."""
        v = self.velocity(x, level, step)
        self._last = x, level, v
        if self.observe is not None:
            self.observe(x, v, step)
        return v

    @property
    def estimate(self) -> Estimate | None:
        """Return the estimate of the last step, None before the first."""
        if self._last is None:
            return None
        x, level, v = self._last
        return Estimate(float(level[0]), x - per_sample(level, x) * v)


def after_schedule(schedule: Schedule, start: int, fraction: float, least: int = 1) -> Schedule:
    """Return the schedule of the steps from `start` on, at fewer levels, which are spaced as those of the whole one.

    The levels of a flow's schedule are s t / (1 + (s - 1) t) of evenly spaced times t. The shift s is read off the schedule
    and interpolated, so that those of a schedule with one shift are exact.

    Args:
        schedule: T+1 levels that fall to 0, and T timesteps.
        start: index of the first of these steps, from 1 to T - 1.
        fraction, least: see `AfterWindow`.
    """
    levels = schedule.levels.to("cpu", torch.float64)
    T = len(levels) - 1
    count = max(math.floor((T - start + 1) * fraction + 1e-9) - 1, min(least, T - start))
    if not count:
        return Schedule(schedule.levels[start : start + 1], schedule.timesteps[:0])
    grid = 1 - torch.arange(1, T, dtype=torch.float64) / T
    shift = levels[1:-1] * (1 - grid) / (grid * (1 - levels[1:-1]))
    time = (1 - start / T) * (1 - torch.arange(count + 1, dtype=torch.float64) / count)
    place = (T * (1 - time) - 1).clamp(0, T - 2)
    below = place.long().clamp(max=max(T - 3, 0))
    s = torch.lerp(shift[below], shift[(below + 1).clamp(max=T - 2)], place - below)
    found = s * time / (1 + (s - 1) * time)
    found[0] = levels[start]
    nearest = (T * (1 - time[:-1])).long().clamp(max=T - 1)
    scale = (schedule.timesteps.to("cpu", torch.float64) / levels[:-1])[nearest]
    return Schedule(found.to(schedule.levels.dtype), (found[:-1] * scale).to(schedule.timesteps))


def finish(
    solver: Literal["euler", "dpmpp_2m"],
    velocity: Callable[[Tensor, Tensor, int], Tensor],
    x: Samples,
    levels: Tensor,
    before: Estimate | None,
) -> Samples:
    """Return the clean samples, `[B, *event]`, that the steps of a schedule lead to.

        dpmpp_2m   x' = (s' / s) x - (1 - s') (exp(-h) - 1) (x0 + (x0 - x0_before) / (2 r)),  x0 = x - s v
                   h = l(s') - l(s),  r = (l(s) - l(s_before)) / h,  l(s) = log((1 - s) / s)

    The last step, to level 0, returns x0. So does Euler's step.

    Args:
        solver: see `AfterWindow`.
        velocity: prediction of the model, v = velocity(x, level `[B]`, step).
        x: sample before the first step.
        levels: noise levels, falling to 0.
        before: estimate of the step before; None takes the first step with first order.
    """
    sigmas = [float(level) for level in levels]
    for step, (s, after) in enumerate(pairwise(sigmas)):
        level = levels[step].to(x.device, x.dtype).expand(len(x)).contiguous()
        v = velocity(x, level, step)
        if solver == "euler" or after == 0:
            x = x + (after - s) * v
            continue
        clean = x - per_sample(level, x) * v
        h = _log_ratio(after) - _log_ratio(s)
        slope = 0.0 if before is None else h / (2 * (_log_ratio(s) - _log_ratio(before.level)))
        estimate = clean if before is None else clean + slope * (clean - before.clean)
        x = (after / s) * x - (1 - after) * math.expm1(-h) * estimate
        before = Estimate(s, clean)
    return x


def _log_ratio(level: float) -> float:
    """Return log((1 - s) / s), half the log of the signal-to-noise ratio; -inf for pure noise."""
    return -math.inf if level >= 1 else math.log((1 - level) / level)
