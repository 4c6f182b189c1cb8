"""Deterministic steps after the window, which may be fewer and of higher order (MixGRPO-Flash)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from fluvial.core.checks import check_fields
from fluvial.engines.choices import refuse_unused
from fluvial.models import Schedule
from fluvial.models.host_values import to_device


@dataclass(frozen=True)
class Tail:
    """How the deterministic steps after the window are taken (MixGRPO-Flash, arXiv 2507.21802).

    Args:
        solver: Solver of these steps: euler, or dpmpp_2m (DPM-Solver++ 2M, arXiv 2211.01095, whose first step
            uses the clean estimate of the window's last step).
        fraction: Fraction of these steps that is taken, at respaced levels: floor(fraction (n + 1)) - 1 of n steps, and at
            least `least`.
        least: Minimum number of these steps; 0 as in the code of MixGRPO-Flash, which decodes a noisy sample after the last
            windows of its schedule.
    """

    solver: Literal["euler", "dpmpp_2m"] = "euler"
    fraction: float = 1.0
    least: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "sampling.window.tail", fraction=(1e-6, 1), least=(0, 2**31))
        refuse_unused(self, "sampling.window.tail.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        if self.fraction == 1:
            yield "least", "with `sampling.window.tail.fraction` 1, which takes every step"


NO_TAIL = Tail()  # steps after the window are taken like those before it


def after_schedule(schedule: Schedule, start: int, fraction: float, least: int = 1) -> Schedule:
    """Return the schedule from step `start` on, with fewer levels, spaced like the full schedule.

    The levels of a flow's schedule are s t / (1 + (s - 1) t) for evenly spaced times t. The shift s is computed from the
    schedule and interpolated, which is exact for a schedule with a single shift.

    `start` is from 1 to T - 1, and the T+1 levels fall to 0. For `fraction` and `least` see `Tail`.
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
    times = s * time / (1 + (s - 1) * time)
    times[0] = levels[start]
    nearest = (T * (1 - time[:-1])).long().clamp(max=T - 1)
    scale = (schedule.timesteps.to("cpu", torch.float64) / levels[:-1])[nearest]
    return Schedule(
        times.to(schedule.levels.dtype),
        to_device((times[:-1] * scale).to(schedule.timesteps.dtype), schedule.timesteps.device),
    )
