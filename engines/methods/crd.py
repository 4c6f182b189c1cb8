"""Centred reward distillation: the model's implicit rewards are fitted to the given ones, both centred over the update."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fluvial.core import crd
from fluvial.core.checks import check_fields
from fluvial.core.nft import reward_prob
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig, LossConfig, add_ema_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Follower, Networks, ramp
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


def _refuses(config: Any) -> Iterator[UsageError]:
    if config.advantage.drop_zero:
        yield UsageError("advantage.drop_zero", True, "False", "crd centres the rewards of all samples")


@dataclass(frozen=True)
class Crd(Method):
    """CRD's loss: the centred implicit reward of each item is fitted to its centred reward (arXiv 2603.14128).

        loss = adv_clip / beta (beta (r - mean r) - (R - mean R))^2 + kl.coef c(R) |v - v_ref|^2
        r = |v_old - target|^2 / w_old - |v - target|^2 / w,  R = (A clipped to adv_clip) / (2 adv_clip) + 1/2

    The means are over the samples of the update, each at the same index of its noise levels. After each rollout an old
    policy becomes d old + (1 - d) policy, and another one, which makes the rollouts, likewise. After n updates d is value
    where n < delay, else min(value + rise (n - delay), cap).

    Args:
        beta: Inverse temperature of the implicit reward, without a unit.
        adv_clip: Bound of the advantages, which are clipped to [-adv_clip, adv_clip].
        match: What is fitted: mse (the squared distance of centred rewards) or bce (the cross-entropy of their sigmoids).
        adaptive: Divide each matching error by its mean absolute error.
        weight_min: Lower bound of that mean absolute error.
        adaptive_kl: Weigh the KL term by c(R) = m + (1 - m) R with m = 1e-4 / kl.coef, so that good samples stay near the
            reference; otherwise c is 1.
        old_value: Decay d of the old policy in the first old_delay updates; 0 follows the policy at once.
        old_rise: Increase of the old policy's decay per update after the delay.
        old_cap: Upper bound of the old policy's decay.
        old_delay: Number of updates before the old policy's decay begins to rise.
        sampling_value: Decay of the policy that makes the rollouts, in the first sampling_delay updates.
        sampling_rise: Increase of that decay per update after the delay.
        sampling_cap: Upper bound of that decay.
        sampling_delay: Number of updates before that decay begins to rise.
    """

    beta: float = 1.0
    adv_clip: float = 5.0
    match: crd.Match = "mse"
    adaptive: bool = True
    weight_min: float = 1e-5
    adaptive_kl: bool = True
    old_value: float = 0.25
    old_rise: float = 0.005
    old_cap: float = 0.999
    old_delay: int = 0
    sampling_value: float = 0.0
    sampling_rise: float = 0.0075
    sampling_cap: float = 0.999
    sampling_delay: int = 75
    traits = ObjectiveTraits(trains_on="noised", flows_only=True, takes_kl=True, refuses=_refuses)

    def __post_init__(self) -> None:
        positive = dict.fromkeys(("beta", "adv_clip", "weight_min"), (1e-12, math.inf))
        bounds = {"value": (0, 0.999999), "rise": (0, 1), "cap": (0, 0.999999), "delay": (0, math.inf)}
        decays = {f"{policy}_{name}": bound for policy in ("old", "sampling") for name, bound in bounds.items()}
        check_fields(self, "objective", **positive, **decays)

    def networks(self, kl: KLConfig) -> Networks:
        """Keep an old policy, one that makes the rollouts, and the references of the KL terms."""
        old = partial(ramp, start=self.old_value, rise=self.old_rise, cap=self.old_cap, delay=self.old_delay)
        slower = partial(ramp, rise=self.sampling_rise, cap=self.sampling_cap, delay=self.sampling_delay)
        sampling = partial(slower, start=self.sampling_value)
        return {"old": Follower(old), "sampling": Follower(sampling, samples_from=0), **kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Centre the implicit and the given rewards over the samples of each update, at each level; fit one to the other."""
        grades = run.grade(batch)
        reward = reward_prob(grades.advantage, adv_clip=self.adv_clip)  # R in [0, 1]
        items = run.noise_samples(batch, key, reward, keep=grades.keep)
        for part in run.minibatches(items, key):
            part = run.predict(part, "old", "ref", "ema")
            implicit = run.gather(part, run.measure(part, self.implicit_reward))  # [B, M]
            used, given = (to_device(table, implicit.device) for table in (part.used != 0, batch.spread(reward)))
            number = used.to(implicit.dtype).sum(0).clamp(min=1)
            means = torch.stack([(values * used).sum(0) / number for values in (implicit, given[:, None])], dim=-1)  # [M, 2]
            yield run.update(part.with_rows(context=part.look_up(means.expand(*implicit.shape, 2))), self.loss)

    def implicit_reward(self, v: Tensor, items: NoisedSamples) -> Tensor:
        """Return the implicit reward of each item, `[P]`."""
        old, least = items.predictions["old"], self.weight_min
        return crd.implicit_reward(v, old, items.target, adaptive=self.adaptive, weight_min=least)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, crd.CrdInfo]:
        """Return `crd.crd_loss` with the KL term."""
        assert items.context is not None
        implicit, reward, (centre, mean) = self.implicit_reward(v, items), items.signal, items.context.unbind(1)
        loss = crd.crd_loss(implicit, centre, reward - mean, beta=self.beta, scale=self.adv_clip, match=self.match)
        info = crd.CrdInfo(implicit.detach(), implicit.detach() - centre, torch.zeros_like(reward))
        if "ref" in items.predictions:
            kl, least = config.error(v, items.predictions["ref"]), 1e-4 / config.kl_coef
            weight = least + (1 - least) * reward if self.adaptive_kl else 1.0
            loss, info = loss + config.kl_coef * weight * kl, info._replace(kl_ref=kl.detach())
        return add_ema_kl(loss, v, items, config), info
