"""Policy gradients with a ratio of the log-probabilities of recorded steps: PPO's and GRPO's clip, and its successors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, dppo_surrogate, guard_surrogate, noise_weighted_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import LossConfig, surrogate_and_kl
from fluvial.engines.methods.protocol import ObjectiveTraits, the_advantage
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.kernels import policy_loss

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

SURROGATE = ObjectiveTraits(trains_on="steps", has_ratio=True, skips_zero=True, takes_kl=True, takes_implementation=True)


def _needs_density(config: "TrainConfig", *, name: str, mean: bool = True) -> Iterator[UsageError]:
    """Yield what keeps recorded log-probabilities from being (mean) log-densities."""
    rollout = config.rollout
    if rollout.form == "unscaled":
        yield UsageError("rollout.form", "unscaled", "density or no_const", f"{name} takes a log-density")
    if mean and rollout.reduction != "mean":
        yield UsageError("rollout.reduction", rollout.reduction, "mean", f"{name} takes nats per dimension")


def _guard_needs(config: "TrainConfig") -> Iterator[UsageError]:
    sampler = config.rollout.sampler
    if not sampler.rule.std_is_a_rate and not sampler.is_deterministic:
        expected = "flow_sde or dance_sde, whose std is a rate times sqrt(|dt|), with guard"
        yield UsageError("rollout.sampler", sampler.kind, expected)
    yield from _needs_density(config, name="guard")


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of PPO and GRPO on recorded steps (arXiv 1707.06347, 2402.03300, 2505.05470).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high]. The ratio is per
            dimension if rollout.reduction is mean.
        clip_high: Upper half-width of the clip.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    traits = replace(SURROGATE, folds_guidance=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `kernels.policy_loss` of the recorded steps."""
        return policy_loss(
            items.transition,
            items.x,
            v,
            items.x_next,
            log_prob_old=items.log_prob_old,
            advantage=items.target_weight,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            v_ref=items.predictions.get("ref"),
            kl_coef=config.kl_coef,
            kl_weight=config.kl_weight,
            dt=items.dt,
            v_uncond=items.predictions.get("uncond"),
            guidance=items.guidance,
            form=config.form,
            reduction=config.reduction,
            implementation=config.implementation,
        )


@dataclass(frozen=True)
class TempFlow:
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

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        numbers = {"clip_low": self.clip_low, "clip_high": self.clip_high, "scale": self.scale}
        return surrogate_and_kl(v, items, config, noise_weighted_surrogate, items.transition.std, **numbers)


@dataclass(frozen=True)
class Dppo:
    """The surrogate of Flow-DPPO: steps whose exact KL is above a threshold are held back (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy adds no gradient.
    """

    kl_threshold: float = 1e-5
    traits = replace(SURROGATE, compares_with=("old",), refuses=partial(_needs_density, name="dppo"))

    def __post_init__(self) -> None:
        check_fields(self, "objective", kl_threshold=(0, math.inf))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"]
        return surrogate_and_kl(v, items, config, dppo_surrogate, *steps, kl_threshold=self.kl_threshold)


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    traits = replace(SURROGATE, compares_with=("old",), refuses=_guard_needs)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip=(0, 1))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"], items.dt
        return surrogate_and_kl(v, items, config, guard_surrogate, *steps, clip=self.clip)
