"""RAFT: supervised fine-tuning on the best samples of each group."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fluvial.core.random import Key
from fluvial.engines.methods.losses import ErrorInfo, KLConfig, fit_prediction
from fluvial.engines.run.method import Images, Method, PassesConfig
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Raft(Method, name="raft"):
    """Reward-ranked fine-tuning: fit the best samples of each group (RAFT, arXiv 2304.06767).

    Args:
        best: Fraction of a group that is fitted, at least one sample. Groups whose rewards are all equal are skipped.
        compare: What a group is: rollout (the samples of a prompt), or, with a dataset in place of rollouts, caption (the
            images of a caption, best of n) or data (images of any captions, fine-tuning on the best of the data).
    """

    bounds: ClassVar = {"best": (1e-9, 1)}
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()
    kl: KLConfig = KLConfig()
    best: float = 0.25
    compare: Literal["rollout", "caption", "data"] = "rollout"

    @property
    def source(self) -> Images | None:
        """A dataset of images, unless samples of rollouts are compared."""
        return None if self.compare == "rollout" else Images(self.compare)

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups, or read images and score them."""
        return super().collect(run, key) if self.compare == "rollout" else run.read(key, scored=True)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the best samples of each group."""
        best = self.choose_best(run.grade(batch).reward, batch.group)
        items = run.noise_samples(batch, self.noising, key, best, keep=best)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def choose_best(self, reward: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best samples of each group, else 0, `[N]`."""
        same = group == group[:, None]
        better = same & (reward > reward[:, None])
        equal = same & (reward == reward[:, None]).tril()  # among equal rewards the first sample counts as the best
        rank = better.sum(1) + equal.sum(1)  # from 1
        count = self.best * same.sum(1).double() + 1e-9  # 0.58 x 50 is 28.999... in floating point
        differs = (same & (reward != reward[:, None])).any(1)
        return ((rank <= count.clamp(min=1)) & differs).to(reward.dtype)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error` of the best samples, 0 for the others, with the KL terms."""
        error = velocity_error(v, rows.target)
        loss, info = fit_prediction(rows.signal * error, v, rows, self.kl)
        return loss, info._replace(error=error.detach())
