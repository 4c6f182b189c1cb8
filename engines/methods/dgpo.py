"""DGPO: a matching error, weighted by the advantage and by a group preference."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.dgpo import DgpoInfo
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.run.declared import Follower, Networks, Start, compute_ramp
from fluvial.engines.run.method import EpochsConfig, Method, Needs
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
class Dgpo(Method, name="dgpo"):
    """DGPO's loss: a matching error, weighted by the advantage and by a group preference (arXiv 2510.08425).

        loss = w_g A |v - (noise - x0)|^2,  w_g = sigmoid(beta / G sum_g A (error - error_ref)),  both means over the event

    The clipped ratio is exp(error_old - error), with an old policy that is a fast moving average: after each rollout it
    becomes d old + (1 - d) policy, with d = min(old_rise (n - 1), old_cap) after n updates.

    Args:
        passes: How often a batch is trained on; a group stays together in one update.
        beta: Inverse temperature of the preference of a group, without a unit.
        clip_low: Lower half-width of the clip of the ratio; items beyond it have no gradient.
        clip_high: Upper half-width of the clip.
        old_rise: Growth of the decay d per update.
        old_cap: Largest decay d, below 1.
        old_samples_from: Number of updates after which the old policy generates the rollouts; None always uses the policy.
        reference: Policy of error_ref: base (where training starts) or old (TDM-R1, arXiv 2603.07700).
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity")
    bounds: ClassVar = {
        **{"beta": (1e-12, math.inf), "clip_low": (0, 1), "clip_high": (0, math.inf)},
        **{"old_rise": (0, 1), "old_cap": (0, 0.999999), "old_samples_from": (0, math.inf)},
    }
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig(draw="rollout")
    advantage: AdvantageConfig = AdvantageConfig()
    passes: EpochsConfig = EpochsConfig()
    kl: KLConfig = KLConfig()
    beta: float = 100.0
    clip_low: float = 1e-2
    clip_high: float = 1e-2
    old_rise: float = 0.001
    old_cap: float = 0.3
    old_samples_from: int | None = None
    reference: Literal["base", "old"] = "base"

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.noising.is_shared:
            yield UsageError("noising.draw", self.noising.draw, "rollout", "dgpo compares samples at the same levels")
        if self.advantage.drop_zero:
            yield UsageError("advantage.drop_zero", True, "False", "dgpo weights entire groups")

    def networks(self) -> Networks:
        """Declare the old policy, which follows fast, and the policy that training starts from."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        decay = partial(compute_ramp, rise=self.old_rise, cap=self.old_cap, delay=1)
        return {"old": Follower(decay, samples_from=start), "ref": Start(self.kl.guidance), **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Weight each item by its advantage, and by the sigmoid of its group's margin at its level."""
        grades = run.grade(batch, self.advantage)
        items = run.noise_samples(batch, self.noising, key, grades.advantage, keep=grades.keep)
        group = torch.arange(batch.share.batch) // batch.compared
        for part in run.minibatches(items, key, self.passes):
            part = run.predict(part)
            margins = run.gather(part, run.measure(part, self.margin))
            counts = to_device((part.used != 0).to(margins.dtype), margins.device)
            weight = dgpo.group_weight(margins, to_device(group, margins.device), counts=counts)
            yield run.update(part.with_rows(context=part.look_up(weight)), self.loss)

    def margin(self, v: Tensor, rows: NoisedSamples) -> Tensor:
        """Return each item's contribution to the argument of its group's sigmoid, `[P]`."""
        reference = rows.predictions["ref" if self.reference == "base" else "old"]
        error, error_ref = (velocity_error(each, rows.target) for each in (v, reference))
        return dgpo.preference_margin(error, error_ref, rows.signal, beta=self.beta)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`, and the KL terms."""
        assert rows.context is not None
        error, error_old = (velocity_error(each, rows.target) for each in (v, rows.predictions["old"]))
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss, info = dgpo.dgpo_loss(error, error_old, rows.signal, rows.context, **clips)
        loss, kl = self.kl.add_to(loss, v, rows)
        return loss, info._replace(kl_ref=kl)
