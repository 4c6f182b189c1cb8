"""Advantage weighted matching: a policy gradient whose log-probability is the matching error."""

import math
from dataclasses import dataclass

from torch import Tensor

from fluvial.core import awm
from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.engines.objectives.losses import LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits, the_advantage
from fluvial.engines.rollout.items import NoisedSamples
from fluvial.kernels import velocity_error


@dataclass(frozen=True)
class Awm:
    """Advantage weighted matching: the clipped surrogate with the matching error as log-probability (arXiv 2509.25050).

    Args:
        weighting: Weighting of the matching error by the noise level, see `core.awm.awm_log_prob`.
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        delta: Rounding of the corner of the two Huber weightings (huber and ghuber), in the unit of the prediction.
        power: Exponent of the weighting ghuber, in (0, 1].
    """

    weighting: awm.Weighting = "ghuber"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    delta: float = 1e-5
    power: float = 0.25
    traits = ObjectiveTraits(
        trains_on="noised",
        compares_with=("old",),
        has_ratio=True,
        skips_zero=True,
        flows_only=True,
        takes_kl=True,
        takes_implementation=True,
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), delta=(1e-12, math.inf), power=(1e-12, 1))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.clipped_surrogate` of `awm.awm_log_prob`."""
        log_prob, log_prob_old = (
            awm.awm_log_prob(
                velocity_error(policy, items.target, implementation=config.implementation),
                items.level,
                weighting=self.weighting,
                delta=self.delta,
                power=self.power,
            )
            for policy in (v, items.predictions["old"])
        )
        loss, info = clipped_surrogate(
            log_prob, log_prob_old, items.target_weight, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
