"""The learning-rate schedule of verl, as a factor of the peak, by the number of calls of `lr_scheduler_step`."""

import math
from collections.abc import Callable
from typing import Any

from fluvial.engines.errors import UsageError


def lr_factor(config: Any) -> Callable[[int], float]:
    """Return the learning rate after n calls of `lr_scheduler_step`, in units of the peak, as verl's FSDP engines have it.

    In a warm-up of w calls it is n / w, so the first updates of a constant schedule with a warm-up have the rate 0. A cosine
    may count from 1 (`zero_indexed_step`).

    Args:
        config: verl's optimizer config.

    Raises:
        UsageError: the schedule is not known, or a cosine does not know the number of steps.
    """
    kind, total = config.lr_scheduler_type, config.total_training_steps
    if kind not in ("constant", "cosine"):
        raise UsageError(f"optim.lr_scheduler_type is {kind!r}, expected 'constant' or 'cosine'")
    warmup = config.lr_warmup_steps if config.lr_warmup_steps is not None else -1
    if (kind == "cosine" or (warmup <= 0 and config.lr_warmup_steps_ratio > 0)) and total <= 0:
        raise UsageError(f"optim.total_training_steps is {total}, expected the number of steps that the schedule depends on")
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    floor, cycles, first = config.min_lr_ratio or 0.0, config.num_cycles, 0 if config.zero_indexed_step else 1

    def constant(done: int) -> float:
        return done / warmup if done < warmup else 1.0

    def cosine(done: int) -> float:
        step = done + first
        if step < warmup:
            return step / warmup
        wave = math.cos(2 * math.pi * cycles * (step - warmup) / max(1, total - warmup))
        return (1 - floor) / 2 * wave + (1 + floor) / 2

    return constant if kind == "constant" else cosine
