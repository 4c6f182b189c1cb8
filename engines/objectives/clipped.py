"""The clipped policy gradient of PPO and GRPO."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo
from fluvial.engines.objectives.losses import LossConfig
from fluvial.engines.objectives.protocol import ObjectiveTraits, the_advantage
from fluvial.engines.rollout.items import RecordedSteps
from fluvial.kernels import policy_loss

# Of a surrogate with a ratio of log-probabilities of recorded steps.
SURROGATE = ObjectiveTraits(trains_on="steps", has_ratio=True, skips_zero=True, takes_kl=True, takes_implementation=True)


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of PPO and GRPO on recorded steps (arXiv 1707.06347, 2402.03300, 2505.05470).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high]. The ratio is per
            dimension if rollout.reduction is mean.
        clip_high: Upper half-width of the clip.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    traits = replace(SURROGATE, folds_guidance=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `kernels.policy_loss` of the recorded steps."""
        return policy_loss(
            items.transition,
            items.x,
            v,
            items.x_next,
            log_prob_old=items.log_prob_old,
            advantage=items.target_weight,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            v_ref=items.predictions.get("ref"),
            kl_coef=config.kl_coef,
            kl_weight=config.kl_weight,
            dt=items.dt,
            v_uncond=items.predictions.get("uncond"),
            guidance=items.guidance,
            form=config.form,
            reduction=config.reduction,
            implementation=config.implementation,
        )
