"""AlignProp and DRaFT: the gradient of a differentiable reward, back through the last steps of the rollout."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig
from fluvial.engines.objectives.protocol import ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items


def _refuses(config: RunSettings) -> Iterator[str]:
    rollout = config.rollout
    through = config.objective.traits.through
    if through is not None and through[0] > rollout.steps:
        yield f"objective.last is {through[0]}, expected at most the {rollout.steps} steps of the schedule"
    if rollout.window is not None or rollout.window_low or rollout.window_high is not None:
        yield "rollout.window is set, and alignprop takes all steps with the sampler again: leave the window as it is"
    if rollout.fraction != 1:
        yield f"rollout.fraction is {rollout.fraction:g}, and alignprop takes the last steps: use fraction 1"
    if config.minibatches * config.epochs > 1:
        yield (
            "minibatches or epochs is above 1, and alignprop takes the last steps of the policy that made the rollout: use 1"
        )


class AlignPropInfo(NamedTuple):
    """Diagnostics of AlignProp, one number per item, without gradient."""

    reward_again: Tensor  # weighted sum of the rewards of the samples, as the update computes them


@dataclass(frozen=True)
class AlignProp:
    """AlignProp's loss: minus a differentiable reward, whose gradient flows back through the last steps (arXiv 2310.03739).

        loss = -scale R(x_0), or scale |R(x_0) - target| with a target

    With `spread` 0 it is DRaFT-K (arXiv 2309.17400). Rewards must be differentiable: PyTorch functions of the images that
    return a tensor with a gradient.

    Args:
        last: Number of last steps that the gradient flows through, K.
        spread: Standard deviation of that number, which is drawn per rollout; 0 always takes `last`.
        target: Reward that is aimed at; None maximises it.
        scale: Factor of the loss.
    """

    last: int = 1
    spread: float = 0.0
    target: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(
            self, "objective", last=(1, 2**31), spread=(0, math.inf), target=(-math.inf, math.inf), scale=(1e-12, math.inf)
        )

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """The learner takes the steps again."""
        return ObjectiveTraits(
            trains_on="steps", rewards="gradients", recorded_form="unscaled", through=(self.last, self.spread),
            refuses=_refuses,
        )  # fmt: skip

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1: all samples learn alike."""
        return torch.ones_like(reward)

    def loss(
        self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig
    ) -> tuple[Tensor, AlignPropInfo]:
        """Return minus the reward of the samples that the last steps lead to, or its distance to the target."""
        assert config.reward is not None
        reward = config.reward(v, items)
        loss = -reward if self.target is None else (reward - self.target).abs()
        return self.scale * loss, AlignPropInfo(reward.detach())
