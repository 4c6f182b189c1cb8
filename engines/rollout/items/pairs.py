"""Pairs of samples with the same noise: the items of objectives that fit preferences."""

from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.random import Key
from fluvial.engines.rollout.items.noised import in_tenth, noised_samples
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.models import Prediction, Schedule


class Pairs(NamedTuple):
    """P pairs of two clean samples at the same level with the same noise, the preferred sample first."""

    x: Tensor  # [P, 2, *event], samples with noise, at which the model is evaluated
    level: Tensor  # [P], their noise level
    timestep: Tensor | None  # [P], timestep that the model is given; None if the model derives it from the level
    sample: Tensor  # [P] int64, row of the conditioning
    weight: Tensor  # [P], weight in the loss: 1, or 0 for pairs that only fill up
    target: Tensor  # [P, 2, *event], what the model should predict
    predictions: dict[str, Tensor]  # of other policies at x, by name: old, ref, teacher, ema

    def parts(self, levels: Tensor) -> Tensor:
        """Return the tenth of the noise levels from 0 to 1 that each pair belongs to, bool `[P, 10]`."""
        return in_tenth(self.level)


def noised_pairs(
    win: Tensor,
    lose: Tensor,
    keys: Key,
    weight: Tensor,
    schedule: Schedule,
    config: NoisingConfig,
    prediction: Prediction,
    *,
    level_keys: Key | None = None,
) -> Pairs:
    """Return each pair at `config.each` noise levels: item m * B + i is pair i at its m-th level.

    Args:
        win, lose: preferred and rejected samples, `[B, *event]`.
        keys, weight, schedule, config, prediction, level_keys: arguments of `noised_samples`.
    """
    better, worse = (
        noised_samples(x0, keys, weight, weight, schedule, config, prediction, level_keys=level_keys) for x0 in (win, lose)
    )
    return Pairs(
        x=torch.stack([better.x, worse.x], dim=1),
        level=better.level,
        timestep=better.timestep,
        sample=better.sample,
        weight=better.weight,
        target=torch.stack([better.target, worse.target], dim=1),
        predictions={},
    )
