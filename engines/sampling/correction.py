"""Correction of a rollout that another program made than the update: other precision, other engine, older weights."""

from dataclasses import dataclass
from typing import Literal

from fluvial.core import correction
from fluvial.core.checks import check_fields


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights that correct for a rollout made by another program than the update (precision, engine or weights).

    The update then computes the old log-probabilities itself, with one more forward pass, and weights each pair by what
    `core.correction` makes of their difference to the rollout's.

    Args:
        mode: What happens to a ratio of densities beyond the threshold: truncate, reject, mask; none corrects nothing.
        level: What a ratio is taken over: a step, or a whole trajectory.
        threshold: Bound of the ratio of densities, per dimension if the log-probability's reduction is mean, so near 1.
    """

    mode: Literal["none", "truncate", "reject", "mask"] = "none"
    level: correction.Level = "step"
    threshold: float = 1.01

    def __post_init__(self) -> None:
        check_fields(self, threshold=(1, 1e30))
