"""Rewards that are kept above a floor while others are learnt from, by a Lagrange multiplier each.

    maximise E[r]  subject to  E[c_k] >= f_k        L = E[r] + sum_k lambda_k (E[c_k] - f_k)

The policy climbs L for the present multipliers: c_k is a reward of weight lambda_k. Each multiplier descends it after
every rollout, projected to [0, most] (as in RCPO, arXiv 1805.11074):

    lambda_k <- clip(lambda_k + lr (f_k - mean c_k), 0, most)
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fluvial.engines.errors import UsageError

# Lagrange multiplier of each reward that has a floor: part of a run's checkpoints.
Multipliers = dict[str, float]


def parse_floors(texts: Sequence[str], *, field: str) -> dict[str, float]:
    """Return the floor of each reward by its name, from `name=floor` each.

    Raises:
        UsageError: one is not a name and a number, or a name stands twice.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        try:
            floor = float(value)
        except ValueError:
            floor = math.nan
        if not name or not separator or not math.isfinite(floor):
            raise UsageError(f"`{field}` holds {text!r}, expected the name of a reward and a number, e.g. ocr=0.8")
        if name in found:
            raise UsageError(f"`{field}` names {name!r} twice: name each reward once")
        found[name] = floor
    return found


def update_multipliers(
    multipliers: Mapping[str, float], means: Mapping[str, float], floors: Mapping[str, float], *, lr: float, most: float
) -> Multipliers:
    """Return the multipliers after a rollout; a missing multiplier starts at 0.

    Args:
        multipliers: those before, by name of the reward.
        means: mean of each reward over the rollout.
        lr: step size, per unit of the reward.
    """
    return {
        name: min(max(multipliers.get(name, 0.0) + lr * (floor - means[name]), 0.0), most) for name, floor in floors.items()
    }


def learnt_weights(weights: Tensor, names: Sequence[str], multipliers: Mapping[str, float]) -> Tensor:
    """Return the weight of each reward in the advantage, `[K]`: a multiplier in place of the weight of one with a floor."""
    return torch.tensor([multipliers.get(name, weight) for name, weight in zip(names, weights.tolist(), strict=True)])


def free_weights(weights: Tensor, names: Sequence[str], floors: Mapping[str, float]) -> Tensor:
    """Return the weights of what is maximised, `[K]`: 0 for rewards that have a floor."""
    return torch.where(torch.tensor([name in floors for name in names], dtype=torch.bool), 0.0, weights)
