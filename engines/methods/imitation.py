"""Fit given samples (SFT), or the best samples of each group (RAFT)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import ErrorInfo, LossConfig, fit_prediction
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.sampling.items import NoisedSamples

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


@dataclass(frozen=True)
class Sft(Method):
    """Supervised fine-tuning: flow matching on the job's own data, without a rollout (arXiv 2210.02747)."""

    traits = ObjectiveTraits(trains_on="noised", rewards="nothing", offline=True, takes_kl=True, takes_implementation=True)

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Read the next images and captions."""
        return run.read(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the images."""
        items = run.noise_samples(batch, key)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error`."""
        return fit_prediction(config.error(v, items.target), v, items, config)


def _raft_needs(config: Any) -> Iterator[UsageError]:
    if config.data and not config.objective.traits.offline:
        hint = "caption compares images with the same caption, data any images"
        yield UsageError("objective.compare", "rollout", "caption or data, with `data`", hint)


@dataclass(frozen=True)
class Raft(Method):
    """Reward-ranked fine-tuning: fit the best samples of each group (RAFT, arXiv 2304.06767).

    Args:
        best: Fraction of a group that is fitted, at least one sample. Groups whose rewards are all equal are skipped.
        compare: What a group is: the samples of a prompt in a rollout; or, of given images (data) and without a rollout,
            the images of a caption (best of n), or images of any captions (supervised fine-tuning on the best of the data).
    """

    best: float = 0.25
    compare: Literal["rollout", "caption", "data"] = "rollout"

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """Given images make the objective offline."""
        return ObjectiveTraits(
            trains_on="noised",
            rewards="order",
            takes_kl=True,
            takes_implementation=True,
            offline=self.compare != "rollout",
            groups="prompt" if self.compare == "rollout" else self.compare,
            refuses=_raft_needs,
        )

    def __post_init__(self) -> None:
        check_fields(self, "objective", best=(1e-9, 1))

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups of images, or read images that are compared with others of their caption, or with any."""
        return run.sample(key) if self.compare == "rollout" else run.read(key, scored=True)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the best of each group."""
        best = self.choose_best(run.grade(batch).reward, batch.group)
        items = run.noise_samples(batch, key, best, keep=best)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "ref", "ema"), self.loss)

    def choose_best(self, reward: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best samples of each group, else 0, `[N]`."""
        same = group == group[:, None]
        better = same & (reward > reward[:, None])
        equal = same & (reward == reward[:, None]).tril()  # among equal rewards the first sample counts as the best
        rank = better.sum(1) + equal.sum(1)  # from 1
        differs = (same & (reward != reward[:, None])).any(1)
        return ((rank <= (self.best * same.sum(1)).clamp(min=1)) & differs).to(reward.dtype)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error` of the kept samples, 0 for the others."""
        return fit_prediction(config.error(v, items.target), v, items, config, weight=items.signal)
