"""AC-DMD: distribution matching at the ends of a student's noisy steps, with a self-consistent fake."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import per_sample
from fluvial.core.distill import ambient_weight, consistency_loss, matching_loss
from fluvial.core.random import Key, fold_in, normal, uniform
from fluvial.core.transitions import cps
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.matching import FakeInfo, MatchInfo, Matching, clean
from fluvial.engines.run.method import Needs
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps, RenoisedSamples
from fluvial.engines.sampling.noising import Levels, UniformLevels
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import OneRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps
from fluvial.engines.streams import Stream
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


@dataclass(frozen=True)
class AcDmd(Matching, name="ac-dmd"):
    """AC-DMD: match teacher and fake at the ends of the student's noisy steps (arXiv 2605.26108).

        x_s   end of a cps step of the student; x_t is x_s with noise up to a level t
        d     cps step of the teacher from x_t to s, minus the fake's with the same noise
        fake  weight |v - u|^2 + consistency (h(x_1) - h(x_t)) (h(x_2) - h(x_t))

    u is `core.distill.ambient_velocity`, h the fake's prediction of the clean sample, and x_1 and x_2 are two steps of the
    fake from x_t to a lower level. RTDMD starts from such a student. On the last step, AC-DMD equals DMD2.

    Args:
        sampling: How the student samples: few steps of cps, without guidance.
        trained: Which step has the gradient: the same for all samples, as published, or one drawn per sample.
        fake_updates: Number of updates of the fake per update of the student, each on an equal part of the samples.
        levels: Distribution of t, from s (0) to 1.
        consistency: Weight of the fake's self-consistency; 0 skips its forward passes.
        span: Largest distance of the lower level from t.
    """

    serving_solver = "consistency"
    shares = True
    bounds: ClassVar = {**Matching.bounds, "consistency": (0, math.inf), "span": (1e-6, 1)}
    sampling: SamplingConfig = SamplingConfig(prompts=80, group=1, steps=4, sampler=Stochastic("cps", eta=0.9))
    trained: TrainedSteps = OneRecorded("rollout")
    fake_updates: int = 10
    levels: Levels = UniformLevels(0.02, 0.98)
    consistency: float = 0.01
    span: float = 0.2

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The consistency term needs the graphs of three forward passes: of x_t, x_1 and x_2."""
        return replace(Matching.needs, graphs=3 if self.consistency else 1)

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if self.sampling.sampler.kind != "cps":
            yield UsageError("sampling.sampler", self.sampling.sampler.kind, "cps", "ac-dmd takes its steps")

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake to the ends of the student's steps, and update the student on the last part of the samples."""
        for number, part in enumerate(self.split(run, batch, key, self.fake_updates), start=1):
            keys, (x_s, s) = run.row_keys(part, key, number), (part.rows.x_next, part.rows.level_next)
            first, second = (normal(fold_in(fold_in(keys, Stream.NOISE), draw), tuple(x_s.shape)) for draw in (0, 1))
            if number == self.fake_updates:
                seen = run.predict(run.renoise(part, x_s, s, self.levels, key), "real", "fake").rows
                real, fake = (self.step(seen, seen.predictions[name], s, first) for name in ("real", "fake"))
                yield run.update(part.with_predictions(correction=real - fake, reference=real), self.loss)
            noisy = run.renoise(part, x_s, s, self.levels, key, draw=number)
            lower = noisy.rows.level - self.span * (1 - uniform(fold_in(keys, Stream.LEVELS), (len(s), 1))[:, 0])
            noisy = noisy.with_rows(context=lower.clamp(min=0)).with_predictions(first=first, second=second)
            run.update(noisy, partial(self.ambient_loss, run, noisy), network="fake")

    def step(self, rows: RenoisedSamples, v: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """Take a step of the student's sampler to a lower level."""
        return gaussian.sample(cps(rows.level, level, eta=self.sampling.sampler.eta), rows.x, v, noise)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, MatchInfo]:  # type: ignore[override]
        """Return `core.distill.matching_loss` at the end of the student's step, with the rollout's noise."""
        x_s = rows.x_next + per_sample(rows.transition.b, v) * (v - v.detach())
        d, reference = rows.predictions["correction"], rows.predictions["reference"]
        return matching_loss(x_s, d, reference, form=self.form, huber=self.huber), MatchInfo((d**2).flatten(1).mean(1))

    def ambient_loss(self, run: "Run", items: "Items", v: Tensor, rows: RenoisedSamples) -> tuple[Tensor, FakeInfo]:
        """Return the weighted error at the ends of the student's steps, with the consistency term."""
        error, lower = velocity_error(v, rows.target), rows.context
        loss = ambient_weight(rows.start_level, rows.level) * error
        if self.consistency and lower is not None:
            ends = [self.step(rows, v.detach(), lower, rows.predictions[name]) for name in ("first", "second")]
            below = [rows._replace(x=x.to(rows.x.dtype), level=lower) for x in ends]
            first, second = (clean(each, run.forward(items, each, "fake")) for each in below)
            loss = loss + self.consistency * consistency_loss(clean(rows, v), first, second)
        return loss, FakeInfo(error.detach())
