"""Advantage weighted matching: a policy gradient whose log-probability is the matching error."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fluvial.core import awm
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.core.random import Key
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.run.declared import Before, Networks
from fluvial.engines.run.method import Method, Needs, PassesConfig
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Awm(Method, name="awm"):
    """Advantage weighted matching: the clipped surrogate with the matching error as log-probability (arXiv 2509.25050).

    Args:
        weighting: Weighting of the matching error by the noise level, see `core.awm.awm_log_prob`.
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        delta: Width of the smooth corner of the weightings huber and ghuber, in the unit of the prediction.
        power: Exponent of the weighting ghuber, in (0, 1].
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity", ratio=True)
    bounds: ClassVar = {"clip_low": (0, 1), "clip_high": (0, math.inf), "delta": (1e-12, math.inf), "power": (1e-12, 1)}
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    weighting: awm.Weighting = "ghuber"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    delta: float = 1e-5
    power: float = 0.25

    def networks(self) -> Networks:
        """Declare the policy before the updates, and the references of the KL terms."""
        return {"old": Before(), **self.kl.networks()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Optimize the clipped surrogate of the matching errors."""
        grades, skip_zero = run.grade(batch, self.advantage), not self.kl.networks()
        items = run.noise_samples(batch, self.noising, key, grades.advantage, keep=grades.keep, skip_zero=skip_zero)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.clipped_surrogate` of `awm.awm_log_prob`, and the KL terms."""
        numbers: Any = {"weighting": self.weighting, "delta": self.delta, "power": self.power}
        log_prob = awm.awm_log_prob(velocity_error(v, rows.target), rows.level, **numbers)
        log_prob_old = awm.awm_log_prob(velocity_error(rows.predictions["old"], rows.target), rows.level, **numbers)
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss, info = clipped_surrogate(log_prob, log_prob_old, rows.signal, **clips)
        loss, kl = self.kl.add_to(loss, v, rows)
        return loss, info._replace(kl_ref=kl)
