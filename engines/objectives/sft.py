"""Supervised fine-tuning: flow matching on given samples."""

from dataclasses import dataclass

from torch import Tensor

from fluvial.engines.objectives.losses import ErrorInfo, LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits, equal_weights
from fluvial.engines.rollout.items import NoisedSamples
from fluvial.kernels import velocity_error


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning: flow matching on the job's own data, without a rollout (arXiv 2210.02747)."""

    traits = ObjectiveTraits(trains_on="noised", rewards="nothing", offline=True, takes_kl=True, takes_implementation=True)

    target_weight = equal_weights

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error`."""
        error = velocity_error(v, items.target, implementation=config.implementation)
        loss, kl = add_velocity_kl(error, v, items, config)
        return loss, ErrorInfo(error.detach(), kl)
