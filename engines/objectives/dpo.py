"""Direct preference optimisation: fit the preferred of two samples more than the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.dpo import DpoInfo, dpo_info, dpo_loss
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.losses import LossConfig
from fluvial.engines.objectives.protocol import ObjectiveTraits, equal_weights
from fluvial.engines.rollout.items import Pairs
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    if config.kl.coef > 0:
        hint = "dpo has the reference in its loss already; `objective.beta` weighs it"
        yield UsageError("kl.coef", config.kl.coef, "0", hint)


@dataclass(frozen=True)
class Dpo:
    """Diffusion-DPO: fit the preferred of two samples more than the other (arXiv 2311.12908, 2501.13918).

    Online, the two are the best and the worst sample of each group of a rollout. Offline, they are read from a folder.

    Args:
        beta: Inverse temperature of the preference, without a unit. It includes the number of steps of the bound, so that
            thousands are usual.
        lose_weight: Weight of the rejected sample in the margin. Below 1 a run diverges less easily, because the policy
            gains less from getting worse at rejected samples.
        preferences: Folder of preferences as `fluvial preferences` writes it (preferences.jsonl and its images), or records
            like those of Pick-a-Pic and HPD; without one the pairs come from the rollout.
    """

    beta: float = 2000.0
    lose_weight: float = 1.0
    preferences: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), lose_weight=(0, 1e6))

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """A folder of preferences makes the objective offline."""
        return ObjectiveTraits(
            trains_on="preferences",
            compares_with=("ref",),
            rewards="order",
            takes_implementation=True,
            offline=self.preferences is not None,
            preferences=self.preferences,
            refuses=_refuses,
        )

    target_weight = equal_weights

    def loss(self, v: Tensor, items: Pairs, config: LossConfig) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; an item holds the preferred sample and the other, `[P, 2, *event]`."""
        errors = [
            velocity_error(each[:, i], items.target[:, i], implementation=config.implementation)
            for each in (v, items.predictions["ref"])
            for i in (0, 1)
        ]
        loss = dpo_loss(*errors, beta=self.beta, lose_weight=self.lose_weight)
        return loss, dpo_info(*errors, beta=self.beta, lose_weight=self.lose_weight)
