"""Flow-DPPO: a policy gradient held back by the exact KL of each step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, dppo_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.clipped import SURROGATE
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl, mean_density
from fluvial.engines.objectives.protocol import the_advantage
from fluvial.engines.rollout.items import RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    yield from mean_density(config, "dppo")


@dataclass(frozen=True)
class Dppo:
    """The surrogate of Flow-DPPO: steps whose exact KL is above a threshold are held back (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy adds no gradient.
    """

    kl_threshold: float = 1e-5
    traits = replace(SURROGATE, compares_with=("old",), refuses=_refuses)

    def __post_init__(self) -> None:
        check_fields(self, "objective", kl_threshold=(0, math.inf))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        log_prob, kl = log_prob_and_kl(v, items, config, v_ref=items.predictions.get("ref"))
        loss, info = dppo_surrogate(
            log_prob,
            items.log_prob_old,
            items.target_weight,
            items.transition,
            v,
            items.predictions["old"],
            kl_threshold=self.kl_threshold,
        )
        return add_step_kl(loss, info, kl, items, config)
