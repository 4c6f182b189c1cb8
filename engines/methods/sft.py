"""SFT: supervised fine-tuning on a dataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from fluvial.core.random import Key
from fluvial.engines.run.method import Images, Method, Needs, PassesConfig
from fluvial.engines.sampling.config import ReadingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


class SftInfo(NamedTuple):
    """Diagnostics of supervised fine-tuning, one number per item, without gradient."""

    error: Tensor  # mean squared error


@dataclass(frozen=True)
class Sft(Method, name="sft"):
    """Supervised fine-tuning: flow matching on a dataset, without rollouts (arXiv 2210.02747).

    Args:
        sampling: Number of images per batch.
        noising: Noise levels at which images are trained on.
    """

    needs: ClassVar[Needs] = Needs(rewards=None)
    sampling: ReadingConfig = ReadingConfig()
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()

    @property
    def source(self) -> Images:
        """A dataset of images."""
        return Images()

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Read the next images and captions."""
        return run.read(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the images."""
        items = run.noise_samples(batch, self.noising, key)
        for part in run.minibatches(items, key, self.passes):
            yield run.update(run.predict(part), self.loss)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, SftInfo]:
        """Return `kernels.velocity_error` to the images' targets."""
        error = velocity_error(v, rows.target)
        return error, SftInfo(error.detach())
