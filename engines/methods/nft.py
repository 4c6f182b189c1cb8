"""DiffusionNFT: towards good samples and away from bad ones, on clean samples with noise on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from torch import Tensor

from fluvial.core import nft
from fluvial.core.checks import check_fields
from fluvial.engines.choices import check_variant
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import LossConfig, add_velocity_kl
from fluvial.engines.methods.protocol import Follower, ObjectiveTraits, ramp
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.kernels import nft_loss

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    if config.followers and config.train == "full":
        hint = "nft's old policy is a second LoRA adapter, unless `objective.old` is none"
        yield UsageError("train", "full", "lora", hint)


class NftInfo(NamedTuple):
    """Diagnostics of DiffusionNFT, one number per item, without gradient."""

    drift: Tensor  # mean |v - v_old|^2
    kl_ref: Tensor  # mean |v - v_ref|^2 where the loss has that term, else 0


@dataclass(frozen=True)
class NoOld:
    """The old policy is the current one."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearOld:
    """The old policy follows the current one after each rollout: old <- d old + (1 - d) policy.

    After n rollouts or updates d is 0 while n < delay, then min(rise (n - delay), cap).

    Args:
        rise: Growth of the decay d per n.
        cap: Largest decay d, below 1.
        delay: Number n before d grows.
        every: Number of rollouts between two updates of the old policy.
        unit: What n counts: rollouts, or optimizer updates (as DiffusionNFT's code does, whose OCR run makes two per
            rollout).
    """

    kind: ClassVar[str] = "linear"
    rise: float = 0.001
    cap: float = 0.5
    delay: int = 0
    every: int = 1
    unit: Literal["rollouts", "updates"] = "rollouts"

    def __post_init__(self) -> None:
        check_fields(self, "objective.old", cap=(0, 1), rise=(0, math.inf), delay=(0, math.inf), every=(1, 2**31))
        if self.cap == 1:
            raise UsageError("`objective.old.cap` is 1, and an old policy with decay 1 never learns: use below 1")

    def decay(self, rollouts: int, updates: int) -> float:
        """Return d, the share of the old policy that stays after a number of rollouts and updates."""
        if rollouts % self.every:
            return 1.0
        done = updates if self.unit == "updates" else rollouts
        return ramp(rollouts, done, rise=self.rise, cap=self.cap, delay=self.delay)


OldPolicy = NoOld | LinearOld


@dataclass(frozen=True)
class Nft:
    """DiffusionNFT's loss: from an old policy towards its good samples and away from its bad ones (arXiv 2509.16117).

    The old policy makes the samples.

    Args:
        beta: Distance of the two implicit policies, the good and the bad one, from the old policy, without a unit.
        mode: How an advantage becomes the probability of a good sample, see `core.nft.reward_prob`.
        adv_clip: Bound of the advantages, which are clipped to [-adv_clip, adv_clip].
        old: The old policy: none (it is the current policy) or linear (it follows that).
        weight_min: Lower bound of the mean absolute error that each item's loss is divided by.
    """

    beta: float = 0.1
    mode: nft.Mode = "all"
    adv_clip: float = 5.0
    old: OldPolicy = field(default_factory=LinearOld)
    weight_min: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self, "objective")
        check_variant(self.old, OldPolicy, "objective.old")
        nft.check_nft_numbers(beta=self.beta, adv_clip=self.adv_clip, weight_min=self.weight_min)

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """The old policy lags behind unless `old` is none; a target weight of 0 is a bad sample, so none is skipped."""
        return ObjectiveTraits(
            trains_on="noised",
            compares_with=("old",),
            flows_only=True,
            takes_kl=True,
            takes_implementation=True,
            followers=() if isinstance(self.old, NoOld) else (Follower("old", self.old.decay, samples_from=0),),
            refuses=_refuses,
        )

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return the probability that a sample is good, in [0, 1]."""
        return nft.reward_prob(advantage, adv_clip=self.adv_clip, mode=self.mode)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, NftInfo]:
        """Return `kernels.nft_loss`."""
        v_old = items.predictions["old"]
        loss = nft_loss(
            v,
            v_old,
            items.x0,
            items.x,
            items.level,
            items.target_weight,
            beta=self.beta,
            adv_clip=self.adv_clip,
            weight_min=self.weight_min,
            implementation=config.implementation,
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, NftInfo(config.error(v.detach(), v_old), kl)
