"""Base of preference methods: pairs of a preferred and a rejected sample, from rollouts or a dataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.dpo import best_and_worst
from fluvial.core.random import Key
from fluvial.engines.run.method import Method, NoisedRows, PassesConfig, Preferences
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import Pairs
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Pairing(Method):
    """A method that trains on pairs. Online, a pair is the best and the worst sample of a group; offline, pairs are read.

    Args:
        preferences: Folder of preferences as written by `fluvial preferences` (preferences.jsonl and its images), or
            records in the format of Pick-a-Pic or HPD. Without it, pairs come from the rollout.
    """

    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()
    preferences: Path | None = None

    @property
    def rows(self) -> NoisedRows:
        """Train on pairs with the same noise."""
        return NoisedRows(self.noising, paired=True)

    @property
    def source(self) -> Preferences | None:
        """The folder of preferences, if it is set."""
        return None if self.preferences is None else Preferences(self.preferences)

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups, or read pairs."""
        return super().collect(run, key) if self.preferences is None else run.read_pairs(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Pair the best and the worst sample of each group, and train on the pairs with shared noise."""
        pairs = batch if batch.paired else self._pair_extremes(run, batch)
        for part in run.minibatches(run.noise_samples(pairs, self.noising, key), key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def _pair_extremes(self, run: "Run", batch: "Batch") -> "Batch":
        """Return the best and the worst sample of each group as pairs; groups with equal rewards have none."""
        chosen = best_and_worst(run.weigh_rewards(batch), batch.group)
        return run.pair(batch, batch.kept_ids[chosen.win[chosen.valid]], batch.kept_ids[chosen.lose[chosen.valid]])


def pair_errors(v: Tensor, rows: Pairs) -> list[Tensor]:
    """Return the errors of a prediction `[P, 2, *event]` on the preferred and on the rejected sample, `[P]` each."""
    return [velocity_error(v[:, side], rows.target[:, side]) for side in (0, 1)]
