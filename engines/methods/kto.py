"""Diffusion-KTO: fits good images better than the reference does, and bad ones worse, without pairs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core.dpo import KtoInfo, Utility, kto_loss
from fluvial.core.random import Key
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.run.method import Images, Method, Needs, PassesConfig
from fluvial.engines.sampling.config import CleanSamplingConfig
from fluvial.engines.sampling.items import NoisedSamples
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Kto(Method, name="kto"):
    """Diffusion-KTO: fit good images better than the reference does, and bad ones worse, without pairs (arXiv 2404.04465).

    Args:
        sampling: How rollouts are sampled, or the number of images per batch.
        labels: Source of the labels: column (images of a dataset whose field `label` is 1 are good, 0 bad) or reward
            (samples of a rollout with a reward above their group's mean are good).
        beta: Inverse temperature of the utility, without a unit. It includes the number of steps of the bound.
        utility: Utility of a gain: sigmoid (bounded on both sides) or log_sigmoid (averse to losses).
        good_weight: Weight of good images.
        bad_weight: Weight of bad images.
        ref_guidance: Guidance scale of the reference; None uses the update's.
    """

    bounds: ClassVar = {"beta": (1e-12, math.inf), "ref_guidance": (0, math.inf)} | dict.fromkeys(
        ("good_weight", "bad_weight"), (0, 1e6)
    )
    sampling: CleanSamplingConfig = CleanSamplingConfig()
    noising: NoisingConfig = NoisingConfig()
    passes: PassesConfig = PassesConfig()
    labels: Literal["column", "reward"] = "column"
    beta: float = 1000.0
    utility: Utility = "sigmoid"
    good_weight: float = 1.0
    bad_weight: float = 1.0
    ref_guidance: float | None = None

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Rewards are needed only for labels."""
        return Needs(rewards="scores" if self.labels == "reward" else None)

    @property
    def source(self) -> Images | None:
        """A dataset of labelled images, unless the labels come from rewards."""
        return Images(column="label", values=(1, 0)) if self.labels == "column" else None

    def networks(self) -> Networks:
        """Declare the policy that training starts from: gains are relative to it."""
        return {"ref": Start(self.ref_guidance)}

    def collect(self, run: "Run", key: Key) -> "Batch":
        """Sample groups, or read labelled images."""
        return super().collect(run, key) if self.source is None else run.read(key)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Compare the gain of each image with the mean gain over all ranks."""
        label = self.read_labels(batch) if self.source else run.grade(batch).advantage.sign()
        items = run.noise_samples(batch, self.noising, key, label, keep=label.abs(), skip_zero=True)
        for part in run.minibatches(items, key, self.passes):
            part = run.predict(part, "ref")
            gains = run.gather(part, run.measure(part, self.gain))
            mean = gains.sum() / part.used.sum().clamp(min=1)
            yield run.update(part.with_rows(context=mean.clamp(min=0).expand(len(part.rows.level))), self.loss)

    def read_labels(self, batch: "Batch") -> Tensor:
        """Return 1 for each good image, -1 for each bad one, `[N]`."""
        return torch.tensor([2.0 * batch.prompt(place).metadata["label"] - 1 for place in batch.kept_ids.tolist()])

    def gain(self, v: Tensor, rows: NoisedSamples) -> Tensor:
        """Return how much smaller the policy's error is than the reference's, `[P]`."""
        return velocity_error(rows.predictions["ref"], rows.target) - velocity_error(v, rows.target)

    def loss(self, v: Tensor, rows: NoisedSamples) -> tuple[Tensor, KtoInfo]:
        """Return `dpo.kto_loss`, weighted by the label."""
        assert rows.context is not None
        loss, info = kto_loss(self.gain(v, rows), rows.context, rows.signal, beta=self.beta, utility=self.utility)
        return torch.where(rows.signal > 0, self.good_weight, self.bad_weight) * loss, info
