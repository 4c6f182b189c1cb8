"""Direct group preference optimisation: a preference between the good and the bad samples of a group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.core.dgpo import DgpoInfo
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.losses import LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import Follower, ObjectiveTraits, the_advantage
from fluvial.engines.rollout.items import NoisedSamples
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    if not config.noising.is_shared:
        yield UsageError("noising.draw", config.noising.draw, "rollout", "dgpo compares samples at the same levels")
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "dgpo's groups belong together in one update")
    if config.advantage.drop_zero:
        yield UsageError("advantage.drop_zero", True, "False", "dgpo weighs whole groups")


@dataclass(frozen=True)
class Dgpo:
    """DGPO's loss: a matching error, weighted by the advantage and by how little its group is preferred (arXiv 2510.08425).

        loss = w_g A |v - (noise - x0)|^2,  w_g = sigmoid(beta / G sum_g A (error - error_ref)),  both means over the event

    An old policy, a fast moving average, gives the ratio exp(error_old - error) that is clipped. After each rollout it
    becomes d old + (1 - d) policy, with d = min(old_rise (n - 1), old_cap) after n updates.

    Args:
        beta: Inverse temperature of the preference of a group, without a unit.
        clip_low: Lower half-width of the clip of the ratio; beyond it an item adds no gradient.
        clip_high: Upper half-width of the clip.
        old_rise: Growth of the decay d per update.
        old_cap: Largest decay d, below 1.
        old_samples_from: Number of updates after which the old policy makes the rollouts; None: the policy makes them.
        reference: Policy of error_ref: base (the one that training starts from) or old (TDM-R1, arXiv 2603.07700).
    """

    beta: float = 100.0
    clip_low: float = 1e-2
    clip_high: float = 1e-2
    old_rise: float = 0.001
    old_cap: float = 0.3
    old_samples_from: int | None = None
    reference: Literal["base", "old"] = "base"

    def __post_init__(self) -> None:
        check_fields(
            self,
            "objective",
            beta=(1e-12, math.inf),
            clip_low=(0, 1),
            clip_high=(0, math.inf),
            old_rise=(0, 1),
            old_cap=(0, 0.999999),
            old_samples_from=(0, math.inf),
        )

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """The old policy is an adapter that follows the policy fast."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        return ObjectiveTraits(
            trains_on="noised",
            compares_with=("old", "ref"),
            flows_only=True,
            takes_kl=True,
            takes_implementation=True,
            gathers=True,
            followers=(Follower("old", self.old_decay, samples_from=start),),
            refuses=_refuses,
        )

    def old_decay(self, rollouts: int, updates: int) -> float:
        """Return d, the share of the old policy that stays after a number of rollouts and updates."""
        return min(self.old_rise * max(updates - 1, 0), self.old_cap)

    target_weight = the_advantage

    def statistic(self, v: Tensor, items: NoisedSamples) -> Tensor:
        """Return what each item adds to the argument of its group's sigmoid."""
        reference = items.predictions["ref" if self.reference == "base" else "old"]
        error, error_ref = (velocity_error(each, items.target) for each in (v, reference))
        return dgpo.preference_margin(error, error_ref, items.target_weight, beta=self.beta)

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the weight of each sample's group at each level."""
        return dgpo.group_weight(statistic, group, counts=counts)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`."""
        assert items.context is not None
        error, error_old = (
            velocity_error(each, items.target, implementation=config.implementation)
            for each in (v, items.predictions["old"])
        )
        loss, info = dgpo.dgpo_loss(
            error, error_old, items.target_weight, items.context, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
