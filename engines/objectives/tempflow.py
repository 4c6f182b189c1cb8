"""TempFlow-GRPO: a clipped policy gradient, weighted by the noise of each step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, noise_weighted_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.clipped import SURROGATE
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl
from fluvial.engines.objectives.protocol import the_advantage
from fluvial.engines.rollout.items import RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    if config.rollout.form == "unscaled":
        yield UsageError("rollout.form", "unscaled", "density or no_const", "tempflow weighs a density by its std")


@dataclass(frozen=True)
class TempFlow:
    """TempFlow-GRPO's surrogate: each step's clipped surrogate times the step's noise (arXiv 2508.04324).

    Its rollouts branch: the samples of a group start from the same noise (rollout.shared_noise) and differ in the noise of a
    single step (rollout.window 1).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        scale: Factor of all weights.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    scale: float = 1.73
    traits = replace(SURROGATE, refuses=_refuses)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), scale=(1e-12, math.inf))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        log_prob, kl = log_prob_and_kl(v, items, config, v_ref=items.predictions.get("ref"))
        loss, info = noise_weighted_surrogate(
            log_prob,
            items.log_prob_old,
            items.target_weight,
            items.transition.std,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            scale=self.scale,
        )
        return add_step_kl(loss, info, kl, items, config)
