"""Centred reward distillation: fits the model's implicit rewards to the rewards, both centred over the update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fluvial.core import crd
from fluvial.core.nft import reward_prob
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.run.declared import Follower, Networks, Ramp
from fluvial.engines.run.method import Method, Needs, PassesConfig
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import velocity_error
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Crd(Method, name="crd"):
    """CRD's loss: fit each item's centred implicit reward to its centred reward (arXiv 2603.14128).

        loss = adv_clip / beta (beta (r - mean r) - (R - mean R))^2 + kl.coef c(R) |v - v_ref|^2
        r = |v_old - target|^2 / w_old - |v - target|^2 / w,  R = (A clipped to adv_clip) / (2 adv_clip) + 1/2

    The means are over the samples of the update, per index of the noise level. After each rollout the old policy becomes
    d old + (1 - d) policy; so does a second old policy, which generates the rollouts, with its own decay.

    Args:
        beta: Inverse temperature of the implicit reward, without a unit.
        adv_clip: Bound of the advantages, which are clipped to [-adv_clip, adv_clip].
        match: Loss between centred rewards: mse (squared distance) or bce (cross-entropy of their sigmoids).
        adaptive: Divide each matching error by its mean absolute error.
        weight_min: Lower bound of that mean absolute error.
        adaptive_kl: Weigh the KL term by c(R) = m + (1 - m) R with m = 1e-4 / kl.coef, so that good samples stay near the
            reference; otherwise c is 1.
        old: Decay of the old policy.
        rollout_policy: Decay of the policy that generates the rollouts.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity")
    bounds: ClassVar = dict.fromkeys(("beta", "adv_clip", "weight_min"), (1e-12, math.inf))
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    beta: float = 1.0
    adv_clip: float = 5.0
    match: crd.Match = "mse"
    adaptive: bool = True
    weight_min: float = 1e-5
    adaptive_kl: bool = True
    old: Ramp = Ramp(start=0.25, rise=0.005)
    rollout_policy: Ramp = Ramp(rise=0.0075, delay=75)

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if self.advantage.drop_zero:
            yield UsageError("advantage.drop_zero", True, "False", "crd centres the rewards of all samples")

    def networks(self) -> Networks:
        """Declare the old policy, the policy that generates the rollouts, and the references of the KL terms."""
        slower = Follower(self.rollout_policy.compute_decay, samples_from=0)
        return {"old": Follower(self.old.compute_decay), "sampling": slower, **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Centre implicit rewards and rewards over the samples of each update, per level; fit one to the other."""
        grades = run.grade(batch, self.advantage)
        reward = reward_prob(grades.advantage, adv_clip=self.adv_clip)  # R in [0, 1]
        items = run.noise_samples(batch, self.noising, key, reward, keep=grades.keep)
        for part in run.minibatches(items, key, self.passes):
            part = run.predict(part)
            implicit = run.gather(part, run.measure(part, self.implicit_reward))  # [B, M]
            used, rewards = (to_device(table, implicit.device) for table in (part.used != 0, batch.spread(reward)))
            count = used.to(implicit.dtype).sum(0).clamp(min=1)
            implicit_mean, reward_mean = ((values * used).sum(0) / count for values in (implicit, rewards[:, None]))  # [M]
            means = torch.stack([implicit_mean, reward_mean], dim=-1)
            yield run.update(part.with_rows(context=part.look_up(means.expand(*implicit.shape, 2))), self.loss)

    def implicit_reward(self, v: Tensor, rows: NoisedSamples) -> Tensor:
        """Return the implicit reward of each item, `[P]`."""
        old, least = rows.predictions["old"], self.weight_min
        return crd.implicit_reward(v, old, rows.target, adaptive=self.adaptive, weight_min=least)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, crd.CrdInfo]:
        """Return `crd.crd_loss` with the KL terms."""
        assert rows.context is not None
        implicit, reward, (implicit_mean, reward_mean) = self.implicit_reward(v, rows), rows.signal, rows.context.unbind(1)
        loss = crd.crd_loss(
            implicit, implicit_mean, reward - reward_mean, beta=self.beta, scale=self.adv_clip, match=self.match
        )
        info = crd.CrdInfo(implicit.detach(), implicit.detach() - implicit_mean, torch.zeros_like(reward))
        if "ref" in rows.predictions:
            kl, least = velocity_error(v, rows.predictions["ref"]), 1e-4 / self.kl.coef
            weight = least + (1 - least) * reward if self.adaptive_kl else 1.0
            loss, info = loss + self.kl.coef * weight * kl, info._replace(kl_ref=kl.detach())
        return self.kl.add_ema(loss, v, rows), info
