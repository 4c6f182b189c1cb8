"""Objectives that fit the prediction, to given samples, to the best or better ones of a group, or to a teacher's."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core import awm, distill
from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, clipped_surrogate
from fluvial.core.random import Key
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import ErrorInfo, KLConfig, LossConfig, add_velocity_kl, fitted
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.batch import Batch, Record
from fluvial.engines.run.networks import Before, Networks, Teacher
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.items import NoisedSamples, RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig


@dataclass(frozen=True)
class Sft(Method):
    """Supervised fine-tuning: flow matching on the job's own data, without a rollout (arXiv 2210.02747)."""

    traits = ObjectiveTraits(trains_on="noised", rewards="nothing", offline=True, takes_kl=True, takes_implementation=True)

    def collect(self, run: Run, key: Key) -> Batch:
        """Read the next images and captions."""
        return run.read(key)

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Fit the images."""
        items = run.noise_samples(batch, key)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error`."""
        return fitted(config.error(v, items.target), v, items, config)


def _raft_needs(config: "TrainConfig") -> Iterator[UsageError]:
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

    def collect(self, run: Run, key: Key) -> Batch:
        """Sample groups of images, or read images that are compared with others of their caption, or with any."""
        return run.sample(key) if self.compare == "rollout" else run.read(key, scored=True)

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
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
        return fitted(config.error(v, items.target), v, items, config, weight=items.signal)


@dataclass(frozen=True)
class Awm(Method):
    """Advantage weighted matching: the clipped surrogate with the matching error as log-probability (arXiv 2509.25050).

    Args:
        weighting: Weighting of the matching error by the noise level, see `core.awm.awm_log_prob`.
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        delta: Rounding of the corner of the two Huber weightings (huber and ghuber), in the unit of the prediction.
        power: Exponent of the weighting ghuber, in (0, 1].
    """

    weighting: awm.Weighting = "ghuber"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    delta: float = 1e-5
    power: float = 0.25
    traits = ObjectiveTraits(
        trains_on="noised",
        has_ratio=True,
        flows_only=True,
        takes_kl=True,
        takes_implementation=True,
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), delta=(1e-12, math.inf), power=(1e-12, 1))

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy before the updates, and the references of the KL terms."""
        return {"old": Before(), **kl.networks()}

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Climb the clipped surrogate of the matching errors, weighted by the advantage."""
        grades = run.grade(batch)
        skip_zero = not run.has("ref", "ema")
        items = run.noise_samples(batch, key, grades.advantage, keep=grades.keep, skip_zero=skip_zero)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.clipped_surrogate` of `awm.awm_log_prob`."""
        log_prob, log_prob_old = (
            awm.awm_log_prob(
                config.error(policy, items.target),
                items.level,
                weighting=self.weighting,
                delta=self.delta,
                power=self.power,
            )
            for policy in (v, items.predictions["old"])
        )
        loss, info = clipped_surrogate(
            log_prob, log_prob_old, items.signal, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)


def _mean_kl_needs(config: "TrainConfig") -> Iterator[UsageError]:
    if config.rollout.sampler.is_deterministic:
        hint = f"mean_kl compares distributions, and steps of {config.rollout.sampler.kind} have no noise"
        yield UsageError("objective.match", "mean_kl", "velocity_mse", hint)


@dataclass(frozen=True)
class Distill(Method):
    """On-policy distillation: fit the teacher's step at the samples that the student reaches (arXiv 2306.13649).

    Args:
        teacher: Folder of the teacher's weights, as a run's export writes them.
        match: What is matched: mean_kl (the KL between the two Gaussian steps, in nats per dimension) or velocity_mse (the
            mean squared distance of the two predictions, which deterministic steps have too).
    """

    teacher: Path | None = None
    match: Literal["mean_kl", "velocity_mse"] = "mean_kl"

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """Matching predictions has a kernel and needs no density of a step; matching steps is the other way round."""
        common = ObjectiveTraits(trains_on="steps", rewards="nothing", takes_kl=True)
        if self.match == "velocity_mse":
            return replace(common, takes_implementation=True)
        return replace(common, refuses=_mean_kl_needs)

    @property
    def record(self) -> Record:
        """Record the steps, in a form that deterministic ones have too if predictions are matched."""
        return Record(form="unscaled" if self.match == "velocity_mse" else None)

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the teacher, and the references of the KL terms."""
        return {"teacher": Teacher(self.teacher), **kl.networks()}

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Fit the teacher's step at each step that the student took."""
        items = run.record_steps(batch, key, keep=run.grade(batch).keep)
        for part in run.minibatches(items, key):
            yield run.update(run.predict(part, "teacher", "ref", "ema"), self.loss)

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return the distance between the student's and the teacher's step."""
        v_teacher, predictions = items.predictions["teacher"], self.match == "velocity_mse"
        error = config.error(v, v_teacher) if predictions else distill.mean_kl(items.transition, v, v_teacher)
        return fitted(error, v, items, config)
