"""Supervised fine-tuning: flow matching on given samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import ErrorInfo, LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits
from fluvial.engines.rollout.items import Items, given
from fluvial.kernels import velocity_error


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning: flow matching on the job's own data, without a rollout (arXiv 2210.02747)."""

    traits = ObjectiveTraits(trains_on="noised", rewards="nothing", offline=True, takes_kl=True, takes_implementation=True)

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1: all samples are fitted alike."""
        return torch.ones_like(reward)

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error`."""
        error = velocity_error(v, given(items.target), implementation=config.implementation)
        loss, kl = add_velocity_kl(error, v, items, config)
        return loss, ErrorInfo(error.detach(), kl)
