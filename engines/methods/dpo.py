"""Diffusion-DPO: fit the preferred of two samples more than the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.dpo import DpoInfo, best_and_worst, dpo_loss
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import KLConfig, LossConfig
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.sampling.items import Pairs

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


def _dpo_needs(config: Any, *, name: str = "dpo") -> Iterator[UsageError]:
    if config.kl.coef > 0:
        hint = f"{name} has the reference in its loss already; `objective.beta` weighs it"
        yield UsageError("kl.coef", config.kl.coef, "0", hint)


@dataclass(frozen=True)
class Dpo(Method):
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
            rewards="order",
            takes_implementation=True,
            offline=self.preferences is not None,
            preferences=self.preferences,
            refuses=_dpo_needs,
        )

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy that training starts from: the margin is relative to it."""
        return {"ref": Start(kl.guidance)}

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups of images, or read pairs."""
        return run.sample(key) if self.preferences is None else run.read_pairs(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Pair the best and the worst sample of each group, and fit the pairs at the same noise."""
        pairs = batch if batch.paired else self._pair_extremes(run, batch)
        for part in run.minibatches(run.noise_samples(pairs, key), key):
            yield run.update(run.predict(part, "ref"), self.loss)

    def _pair_extremes(self, run: "Run", batch: "Batch") -> "Batch":
        """Return the best and the worst sample of each group as pairs; groups with equal rewards have none."""
        chosen = best_and_worst(run.reward(batch), batch.group)
        return run.pair(batch, batch.kept[chosen.win[chosen.valid]], batch.kept[chosen.lose[chosen.valid]])

    def loss(self, v: Tensor, items: Pairs, config: LossConfig) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; an item holds the preferred sample and the other, `[P, 2, *event]`."""
        policies = v, items.predictions["ref"]
        errors = [config.error(each[:, i], items.target[:, i]) for each in policies for i in (0, 1)]
        return dpo_loss(*errors, beta=self.beta, lose_weight=self.lose_weight)
