"""TempFlow-GRPO: a clipped policy gradient, weighted by the noise of each step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, noise_weighted_surrogate
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl, recorded_step
from fluvial.engines.objectives.protocol import ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items


def _refuses(config: RunSettings) -> Iterator[str]:
    if config.rollout.form == "unscaled":
        yield "rollout.form is unscaled, and tempflow weighs a density by its std: use form density or no_const"


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
    traits = ObjectiveTraits(
        trains_on="steps", has_ratio=True, skips_zero=True, takes_kl=True, takes_implementation=True, refuses=_refuses
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), scale=(1e-12, math.inf))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return the advantage."""
        return advantage

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        step = recorded_step(items, transition)
        log_prob, kl = log_prob_and_kl(v, items, step, config)
        loss, info = noise_weighted_surrogate(
            log_prob, step.log_prob_old, items.target_weight, step.transition.std, clip_low=self.clip_low,
            clip_high=self.clip_high, scale=self.scale,
        )  # fmt: skip
        return add_step_kl(loss, info, kl, step, config)
