"""DGPO: a matching error, weighted by the advantage and by how little its group is preferred."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.core.dgpo import DgpoInfo
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig, LossConfig, add_velocity_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Follower, Networks, Start, ramp
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


def _dgpo_needs(config: Any) -> Iterator[UsageError]:
    if not config.noising.is_shared:
        yield UsageError("noising.draw", config.noising.draw, "rollout", "dgpo compares samples at the same levels")
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "dgpo's groups belong together in one update")
    if config.advantage.drop_zero:
        yield UsageError("advantage.drop_zero", True, "False", "dgpo weighs whole groups")


@dataclass(frozen=True)
class Dgpo(Method):
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
    traits = ObjectiveTraits(
        trains_on="noised", flows_only=True, takes_kl=True, takes_implementation=True, refuses=_dgpo_needs
    )

    def __post_init__(self) -> None:
        any_size = (0, math.inf)
        own = {"old_rise": (0, 1), "old_cap": (0, 0.999999), "old_samples_from": any_size}
        check_fields(self, "objective", beta=(1e-12, math.inf), clip_low=(0, 1), clip_high=any_size, **own)

    def networks(self, kl: KLConfig) -> Networks:
        """Keep an old policy that follows the policy fast, and the policy that training starts from."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        decay = partial(ramp, rise=self.old_rise, cap=self.old_cap, delay=1)
        return {"old": Follower(decay, samples_from=start), "ref": Start(kl.guidance), **kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Weigh each item by its advantage, and by the sigmoid of its group's margin at its level."""
        grades = run.grade(batch)
        items = run.noise_samples(batch, key, grades.advantage, keep=grades.keep)
        group = torch.arange(batch.share.batch) // batch.compared
        for part in run.minibatches(items, key):
            part = run.predict(part, "old", "ref", "ema")
            margins = run.gather(part, run.measure(part, self.margin))
            counts = to_device((part.used != 0).to(margins.dtype), margins.device)
            weight = dgpo.group_weight(margins, to_device(group, margins.device), counts=counts)
            yield run.update(part.with_rows(context=part.look_up(weight)), self.loss)

    def margin(self, v: Tensor, items: NoisedSamples) -> Tensor:
        """Return what each item adds to the argument of its group's sigmoid."""
        reference = items.predictions["ref" if self.reference == "base" else "old"]
        error, error_ref = (LossConfig().error(each, items.target) for each in (v, reference))
        return dgpo.preference_margin(error, error_ref, items.signal, beta=self.beta)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`."""
        assert items.context is not None
        error, error_old = (config.error(each, items.target) for each in (v, items.predictions["old"]))
        loss, info = dgpo.dgpo_loss(
            error, error_old, items.signal, items.context, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
