"""Advantage weighted matching: a policy gradient whose log-probability is the matching error."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core import awm
from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.core.random import Key
from fluvial.engines.methods.losses import KLConfig, LossConfig, add_velocity_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Before, Networks
from fluvial.engines.sampling.items import NoisedSamples

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


@dataclass(frozen=True)
class Awm(Method):
    """Advantage weighted matching: the clipped surrogate with the matching error as log-probability (arXiv 2509.25050).

    Args:
        weighting: Weighting of the matching error by the noise level, see `core.awm.awm_log_prob`.
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        delta: Rounding of the corner of the two Huber weightings (huber and ghuber), in the unit of the prediction.
        power: Exponent of the weighting ghuber, in (0, 1].
    """

    weighting: awm.Weighting = "ghuber"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    delta: float = 1e-5
    power: float = 0.25
    traits = ObjectiveTraits(
        trains_on="noised",
        has_ratio=True,
        flows_only=True,
        takes_kl=True,
        takes_implementation=True,
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), delta=(1e-12, math.inf), power=(1e-12, 1))

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy before the updates, and the references of the KL terms."""
        return {"old": Before(), **kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Climb the clipped surrogate of the matching errors, weighted by the advantage."""
        grades = run.grade(batch)
        skip_zero = not run.has("ref", "ema")
        items = run.noise_samples(batch, key, grades.advantage, keep=grades.keep, skip_zero=skip_zero)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.clipped_surrogate` of `awm.awm_log_prob`."""
        log_prob, log_prob_old = (
            awm.awm_log_prob(
                config.error(policy, items.target),
                items.level,
                weighting=self.weighting,
                delta=self.delta,
                power=self.power,
            )
            for policy in (v, items.predictions["old"])
        )
        loss, info = clipped_surrogate(
            log_prob, log_prob_old, items.signal, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
