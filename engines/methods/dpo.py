"""Diffusion-DPO: fit the preferred of two samples more than the other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fluvial.core.dpo import DpoInfo, best_and_worst, dpo_loss
from fluvial.core.random import Key
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.run.method import Method, NoisedRows, PassesConfig, Preferences
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import Pairs
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.sampling.samplers import Ode
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


@dataclass(frozen=True)
class Dpo(Method, name="dpo"):
    """Diffusion-DPO: fit the preferred of two samples more than the other (arXiv 2311.12908, 2501.13918).

    Online, the two are the best and the worst sample of each group of a rollout. Offline, they are read from a folder.

    Args:
        sampling: How samples are made.
        noising: Noise levels at which clean samples are trained on.
        passes: How often a batch is learnt from.
        beta: Inverse temperature of the preference, without a unit. It includes the number of steps of the bound, so that
            thousands are usual.
        lose_weight: Weight of the rejected sample in the margin. Below 1 a run diverges less easily, because the policy
            gains less from getting worse at rejected samples.
        preferences: Folder of preferences as `fluvial preferences` writes it (preferences.jsonl and its images), or records
            like those of Pick-a-Pic and HPD; without one the pairs come from the rollout.
        ref_guidance: Scale of classifier-free guidance of the reference's prediction; None is that of the update's.
    """

    bounds: ClassVar = {"beta": (1e-12, math.inf), "lose_weight": (0, 1e6), "ref_guidance": (0, math.inf)}
    sampling: SamplingConfig = SamplingConfig(sampler=Ode())
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()
    beta: float = 2000.0
    lose_weight: float = 1.0
    preferences: Path | None = None
    ref_guidance: float | None = None

    @property
    def rows(self) -> NoisedRows:
        """Train on pairs with the same noise."""
        return NoisedRows(self.noising, paired=True)

    @property
    def source(self) -> Preferences | None:
        """Read pairs where a folder of them is given."""
        return None if self.preferences is None else Preferences(self.preferences)

    def networks(self) -> Networks:
        """Keep the policy that training starts from: the margin is relative to it."""
        return {"ref": Start(self.ref_guidance)}

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups of images, or read pairs."""
        return super().collect(run, key) if self.preferences is None else run.read_pairs(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Pair the best and the worst sample of each group, and fit the pairs at the same noise."""
        pairs = batch if batch.paired else self._pair_extremes(run, batch)
        for part in run.minibatches(run.noise_samples(pairs, self.noising, key), key, self.passes):
            yield run.update(run.predict(part, "ref"), self.loss)

    def _pair_extremes(self, run: "Run", batch: "Batch") -> "Batch":
        """Return the best and the worst sample of each group as pairs; groups with equal rewards have none."""
        chosen = best_and_worst(run.reward(batch), batch.group)
        return run.pair(batch, batch.kept[chosen.win[chosen.valid]], batch.kept[chosen.lose[chosen.valid]])

    def loss(self, v: Tensor, rows: Pairs) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; a row holds the preferred sample and the other, `[P, 2, *event]`."""
        policies = v, rows.predictions["ref"]
        errors = [velocity_error(each[:, i], rows.target[:, i]) for each in policies for i in (0, 1)]
        return dpo_loss(*errors, beta=self.beta, lose_weight=self.lose_weight)
