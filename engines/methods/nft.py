"""DiffusionNFT: towards good samples and away from bad ones, on clean samples with noise on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fluvial.core import nft
from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.choices import check_variant
from fluvial.engines.methods.losses import KLConfig, LossConfig, add_velocity_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Before, Follower, LinearOld, Networks, NoOld, OldPolicy
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.kernels import nft_loss

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


class NftInfo(NamedTuple):
    """Diagnostics of DiffusionNFT, one number per item, without gradient."""

    drift: Tensor  # mean |v - v_old|^2
    kl_ref: Tensor  # mean |v - v_ref|^2 where the loss has that term, else 0


@dataclass(frozen=True)
class Nft(Method):
    """DiffusionNFT: from an old policy towards its good samples and away from its bad ones (arXiv 2509.16117).

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
    traits = ObjectiveTraits(trains_on="noised", flows_only=True, takes_kl=True, takes_implementation=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", **dict.fromkeys(("beta", "adv_clip", "weight_min"), (1e-12, math.inf)))
        check_variant(self.old, OldPolicy, "objective.old")

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the old policy, which makes the samples, and the references of the KL terms."""
        old = Before() if isinstance(self.old, NoOld) else Follower(self.old.decay, samples_from=0)
        return {"old": old, **kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the good one of the implicit policies to good samples, and the bad one to bad samples."""
        grades = run.grade(batch)
        good = nft.reward_prob(grades.advantage, adv_clip=self.adv_clip, mode=self.mode)
        items = run.noise_samples(batch, key, good, keep=grades.keep)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "old", "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, NftInfo]:
        """Return `kernels.nft_loss`."""
        v_old, kernel = items.predictions["old"], config.implementation
        fields = items.x0, items.x, items.level, items.signal
        loss = nft_loss(
            v, v_old, *fields, beta=self.beta, adv_clip=self.adv_clip, weight_min=self.weight_min, implementation=kernel
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, NftInfo(config.error(v.detach(), v_old), kl)
