"""Flow-DPPO: a policy gradient held back by the exact KL of each step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, dppo_surrogate
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl, recorded_step
from fluvial.engines.objectives.protocol import ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items, given


def _refuses(config: RunSettings) -> Iterator[str]:
    rollout = config.rollout
    if rollout.form == "unscaled" or rollout.reduction != "mean":
        yield (
            f"rollout.form is {rollout.form} and rollout.reduction is {rollout.reduction}, and dppo compares a mean "
            "log-density with a mean KL: use form density or no_const, and reduction mean"
        )


@dataclass(frozen=True)
class Dppo:
    """The surrogate of Flow-DPPO: steps whose exact KL is above a threshold are held back (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy adds no gradient.
    """

    kl_threshold: float = 1e-5
    traits = ObjectiveTraits(
        trains_on="steps", compares_with=("old",), has_ratio=True, skips_zero=True, takes_kl=True,
        takes_implementation=True, refuses=_refuses,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, "objective", kl_threshold=(0, math.inf))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return the advantage."""
        return advantage

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        step = recorded_step(items, transition)
        log_prob, kl = log_prob_and_kl(v, items, step, config)
        loss, info = dppo_surrogate(
            log_prob, step.log_prob_old, items.target_weight, step.transition, v, given(items.v_old),
            kl_threshold=self.kl_threshold,
        )  # fmt: skip
        return add_step_kl(loss, info, kl, step, config)
