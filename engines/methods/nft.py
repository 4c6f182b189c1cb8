"""DiffusionNFT: trains on noised clean samples, towards good and away from bad ones."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from fluvial.core import nft
from fluvial.core.random import Key
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.run.declared import Before, Follower, LinearOld, Networks, NoOld, OldPolicy
from fluvial.engines.run.method import Method, Needs, PassesConfig
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import nft_loss, velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


class NftInfo(NamedTuple):
    """Diagnostics of DiffusionNFT, one number per item, without gradient."""

    drift: Tensor  # mean |v - v_old|^2
    kl_ref: Tensor  # mean |v - v_ref|^2, 0 without a reference


@dataclass(frozen=True)
class Nft(Method, name="nft"):
    """DiffusionNFT: move from an old policy towards its good samples and away from its bad ones (arXiv 2509.16117).

        v+ = (1 - beta) v_old + beta v,  v- = (1 + beta) v_old - beta v
        loss = adv_clip / beta (r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-)

    The old policy generates the samples. r is the probability that a sample is good, from its advantage; w is a mean error.

    Args:
        beta: Distance of the two implicit policies, the good and the bad one, from the old policy, without a unit.
        mode: How an advantage becomes the probability of a good sample, see `core.nft.reward_prob`.
        adv_clip: Bound of the advantages, which are clipped to [-adv_clip, adv_clip].
        old: Old policy: none (the current policy) or linear (follows the current policy).
        weight_min: Lower bound of the mean absolute error that each item's loss is divided by.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity")
    bounds: ClassVar = dict.fromkeys(("beta", "adv_clip", "weight_min"), (1e-12, math.inf))
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    beta: float = 0.1
    mode: nft.Mode = "all"
    adv_clip: float = 5.0
    old: OldPolicy = LinearOld()
    weight_min: float = 1e-5

    def networks(self) -> Networks:
        """Declare the old policy, which generates all rollouts, and the references of the KL terms."""
        old = Before() if isinstance(self.old, NoOld) else Follower(self.old.compute_decay, samples_from=0)
        return {"old": old, **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the good implicit policy to good samples, and the bad one to bad samples."""
        grades = run.grade(batch, self.advantage)
        reward_prob = nft.reward_prob(grades.advantage, adv_clip=self.adv_clip, mode=self.mode)
        items = run.noise_samples(batch, self.noising, key, reward_prob, keep=grades.keep)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, NftInfo]:
        """Return `kernels.nft_loss`, and the KL terms."""
        v_old, fields = rows.predictions["old"], (rows.x0, rows.x, rows.level, rows.signal)
        loss = nft_loss(v, v_old, *fields, beta=self.beta, adv_clip=self.adv_clip, weight_min=self.weight_min)
        loss, kl = self.kl.add_to(loss, v, rows)
        return loss, NftInfo(velocity_error(v.detach(), v_old), kl)
