"""Successors of GRPO, which differ in how a step's ratio is weighed or held back: TempFlow-GRPO, Flow-DPPO, GRPO-Guard."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, dppo_surrogate, guard_surrogate, noise_weighted_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import SURROGATE, PolicyGradient
from fluvial.engines.methods.losses import LossConfig, surrogate_and_kl
from fluvial.engines.run.declared import Record
from fluvial.engines.sampling.items import RecordedSteps


def _needs_density(config: Any, *, name: str, mean: bool = True) -> Iterator[UsageError]:
    """Yield what keeps recorded log-probabilities from being (mean) log-densities."""
    rollout = config.rollout
    if rollout.form == "unscaled":
        yield UsageError("rollout.form", "unscaled", "density or no_const", f"{name} takes a log-density")
    if mean and rollout.reduction != "mean":
        yield UsageError("rollout.reduction", rollout.reduction, "mean", f"{name} takes nats per dimension")


def _guard_needs(config: Any) -> Iterator[UsageError]:
    sampler = config.rollout.sampler
    if not sampler.rule.std_is_a_rate and not sampler.is_deterministic:
        expected = "flow_sde or dance_sde, whose std is a rate times sqrt(|dt|), with guard"
        yield UsageError("rollout.sampler", sampler.kind, expected)
    yield from _needs_density(config, name="guard")


@dataclass(frozen=True)
class TempFlow(PolicyGradient):
    """TempFlow-GRPO's surrogate: each step's clipped surrogate times the step's noise (arXiv 2508.04324).

    Its rollouts branch: the samples of a group start from the same noise (rollout.shared_noise) and differ in the noise of a
    single step (rollout.window 1).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        scale: Factor of all weights.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    scale: float = 1.73
    traits = replace(SURROGATE, refuses=partial(_needs_density, name="tempflow", mean=False))

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), scale=(1e-12, math.inf))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        numbers = {"clip_low": self.clip_low, "clip_high": self.clip_high, "scale": self.scale}
        return surrogate_and_kl(v, items, config, noise_weighted_surrogate, items.transition.std, **numbers)


@dataclass(frozen=True)
class Dppo(PolicyGradient):
    """The surrogate of Flow-DPPO: steps whose exact KL is above a threshold are held back (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy adds no gradient.
    """

    kl_threshold: float = 1e-5
    traits = replace(SURROGATE, refuses=partial(_needs_density, name="dppo"))
    record = Record(velocity=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", kl_threshold=(0, math.inf))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"]
        return surrogate_and_kl(v, items, config, dppo_surrogate, *steps, kl_threshold=self.kl_threshold)


@dataclass(frozen=True)
class Guard(PolicyGradient):
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    traits = replace(SURROGATE, refuses=_guard_needs)
    record = Record(velocity=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip=(0, 1))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"], items.dt
        return surrogate_and_kl(v, items, config, guard_surrogate, *steps, clip=self.clip)
