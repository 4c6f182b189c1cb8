"""Successors of GRPO that weight or clip a step's ratio in another way: TempFlow-GRPO, Flow-DPPO, GRPO-Guard."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fluvial.core.gaussian import Reduction
from fluvial.core.policy import PolicyInfo, dppo_surrogate, guard_surrogate, noise_weighted_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import PolicyGradient
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.kernels import step_log_prob

Density = Literal["density", "no_const"]


class Surrogate(PolicyGradient):
    """A policy gradient whose surrogate takes a log-density in nats per dimension."""

    def add_kl(
        self, v: Tensor, rows: RecordedSteps, surrogate: Any, *steps: Any, **numbers: float
    ) -> tuple[Tensor, PolicyInfo]:
        """Return a surrogate of recorded steps with the KL terms added, and its diagnostics.

        Args:
            v: the policy's prediction.
            surrogate: `(log_prob, log_prob_old, advantage, *steps, **numbers) -> (loss, info)`, see `core.policy`.
            steps: further tensor arguments of the surrogate.
            numbers: hyper-parameters of the surrogate.
        """
        log_prob, kl = step_log_prob(
            rows.transition,
            rows.x,
            v,
            rows.x_next,
            v_ref=rows.predictions.get("ref"),
            form=self.form,
            reduction=self.reduction,
        )
        loss, info = surrogate(log_prob, rows.log_prob_old, rows.signal, *steps, **numbers)
        return self.kl.add_to_steps(loss, info, kl, v, rows, self.sampling.sampler.rule, self.reduction)


@dataclass(frozen=True)
class TempFlow(Surrogate, name="tempflow"):
    """TempFlow-GRPO's surrogate: each step's clipped surrogate times the step's noise (arXiv 2508.04324).

    The samples of a group start from the same noise (sampling.shared_noise) and differ in one step (sampling.window).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        scale: Factor of all weights.
        form: Form of the log-probability: density, or no_const (without its constant).
        reduction: Reduction of the log-probability over pixels: mean (nats per dimension, the unit of the clip range) or
            sum (nats).
    """

    bounds: ClassVar = {"clip_low": (0, 1), "clip_high": (0, math.inf), "scale": (1e-12, math.inf)}
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    scale: float = 1.73
    form: Density = "density"  # type: ignore[misc]
    reduction: Reduction = "mean"  # type: ignore[misc]

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        numbers = {"clip_low": self.clip_low, "clip_high": self.clip_high, "scale": self.scale}
        return self.add_kl(v, rows, noise_weighted_surrogate, rows.transition.std, **numbers)


@dataclass(frozen=True)
class Dppo(Surrogate, name="dppo"):
    """Flow-DPPO's surrogate: steps whose exact KL is above a threshold are masked (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy has no gradient.
        form: Form of the log-probability, in nats per dimension: density, or no_const (without its constant).
    """

    bounds: ClassVar = {"kl_threshold": (0, math.inf)}
    records_velocity = True
    kl_threshold: float = 1e-5
    form: Density = "density"  # type: ignore[misc]

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        steps = rows.transition, v, rows.predictions["old"]
        return self.add_kl(v, rows, dppo_surrogate, *steps, kl_threshold=self.kl_threshold)


@dataclass(frozen=True)
class Guard(Surrogate, name="guard"):
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
        form: Form of the log-probability, in nats per dimension: density, or no_const (without its constant).
    """

    bounds: ClassVar = {"clip": (0, 1)}
    records_velocity = True
    clip: float = 1e-3
    form: Density = "density"  # type: ignore[misc]

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if not self.sampling.sampler.rule.std_is_a_rate:
            expected = "flow_sde or dance_sde, whose std is a rate times sqrt(|dt|), with guard"
            yield UsageError("sampling.sampler", self.sampling.sampler.kind, expected)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        steps = rows.transition, v, rows.predictions["old"], rows.dt
        return self.add_kl(v, rows, guard_surrogate, *steps, clip=self.clip)
