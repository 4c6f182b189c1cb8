"""Direct group preference optimisation: a preference between the good and the bad samples of a group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.core.dgpo import DgpoInfo
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import Follower, ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items, given
from fluvial.kernels import velocity_error


def _refuses(config: RunSettings) -> Iterator[str]:
    if not config.noising.shared:
        yield (
            "noising.shared is False, and dgpo compares the samples of a group at the same levels: use noising.shared True"
        )
    if config.minibatches > 1:
        yield f"minibatches is {config.minibatches}, and dgpo's groups belong together in one update: use minibatches 1"
    if config.advantage.drop_zero:
        yield "advantage.drop_zero is set, and dgpo weighs whole groups: leave it False"


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
    """

    beta: float = 100.0
    clip_low: float = 1e-2
    clip_high: float = 1e-2
    old_rise: float = 0.001
    old_cap: float = 0.3
    old_samples_from: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self, "objective", beta=(1e-12, math.inf), clip_low=(0, 1), clip_high=(0, math.inf), old_rise=(0, 1),
            old_cap=(0, 0.999999), old_samples_from=(0, math.inf),
        )  # fmt: skip

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """The old policy is an adapter that follows the policy fast."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        return ObjectiveTraits(
            trains_on="noised", compares_with=("old", "ref"), flows_only=True, takes_kl=True, takes_implementation=True,
            gathers=True, followers=(Follower("old", self.old_decay, samples_from=start),), refuses=_refuses,
        )  # fmt: skip

    def old_decay(self, rollouts: int, updates: int) -> float:
        """Return d, the share of the old policy that stays after a number of rollouts and updates."""
        return min(self.old_rise * max(updates - 1, 0), self.old_cap)

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return the advantage."""
        return advantage

    def statistic(self, v: Tensor, items: Items) -> Tensor:
        """Return what each item adds to the argument of its group's sigmoid."""
        target = given(items.target)
        return dgpo.preference_margin(
            velocity_error(v, target), velocity_error(given(items.v_ref), target), items.target_weight, beta=self.beta
        )

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the weight of each sample's group at each level."""
        return dgpo.group_weight(statistic, group, counts=counts)

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`."""
        target = given(items.target)
        error, error_old = (
            velocity_error(of, target, implementation=config.implementation) for of in (v, given(items.v_old))
        )
        loss, info = dgpo.dgpo_loss(
            error, error_old, items.target_weight, given(items.context), clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
