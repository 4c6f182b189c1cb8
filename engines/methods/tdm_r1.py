"""TDM-R1: trains a few-step student on any reward, through a surrogate that prefers its better samples."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.core.distill import MatchForm, matching_loss
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.matching import FakeInfo, MatchInfo, Matching, clean
from fluvial.engines.methods.surrogate import SurrogateConfig
from fluvial.engines.run.declared import Base, Networks
from fluvial.engines.run.method import Needs
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps, RenoisedSamples
from fluvial.engines.sampling.noising import Levels, UniformLevels
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.sampling.window import RandomRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


@dataclass(frozen=True)
class TdmR1(Matching, name="tdm-r1"):
    """TDM-R1 in its authors' form: matching of the teacher's guidance, of the surrogate, and of the base (arXiv 2603.07700).

        loss = tdm m(real - base) + (1 - tdm) m(surrogate - base) + m(base - fake)

    m is `core.distill.matching_loss` of differences of predicted clean samples, at the ends of the student's steps.

    Args:
        sampling: How the student samples: few steps of the ODE, without guidance.
        trained: Which steps have a gradient.
        fake_kl: Weight of the fake's squared distance to the base.
        surrogate: Training of the surrogate.
        tdm: Weight of the teacher's guidance; the surrogate has the weight 1 - tdm.
        levels: Distribution of the noise levels, from 0 (the step's end, or the lowest level) to 1.
    """

    needs: ClassVar[Needs] = Needs(prediction="velocity", off_schedule=True)
    follows_ode = True
    bounds: ClassVar = {**Matching.bounds, "tdm": (0, 1), "fake_kl": (0, math.inf)}
    sampling: SamplingConfig = SamplingConfig(prompts=48, group=24, steps=4, sampler=Ode())
    trained: TrainedSteps = RandomRecorded(0.5)
    advantage: AdvantageConfig = AdvantageConfig(scale="batch", clip=5.0)
    fake_kl: float = 0.02
    surrogate: SurrogateConfig = field(default_factory=SurrogateConfig)
    tdm: float = 0.3
    levels: Levels = UniformLevels(0.02, 0.98)
    form: MatchForm = "square"

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        if (led := self.surrogate.steps or 0) > (steps := self.sampling.steps):
            yield UsageError("surrogate.steps", led, f"at most the {steps} steps of the schedule")

    def networks(self) -> Networks:
        """Declare the teacher, the base, the fake, and the surrogate with its moving average and its guided form."""
        return super().networks() | self.surrogate.networks() | {"base": Base(1.0)}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake, train the surrogate to prefer better samples, then update the student by both."""
        grades, q = run.grade(batch, self.advantage), self.surrogate
        items = partial(run.record_steps, batch, key, grades.advantage, keep=grades.keep)
        part, judged = (next(run.minibatches(items(trained=each), key, self.passes)) for each in (self.trained, q.trained))
        run.update(run.predict(self.renoise(run, part, key), "base"), self.fake_loss, network="fake")
        judged = self.renoise(run, judged, key, q.lowest, shared=True, draw=1)
        noisy = run.predict(judged, "surrogate", "average", "base")
        run.update(q.weigh(run, noisy), q.prefer, network="surrogate")
        seen = run.predict(self.renoise(run, part, key, draw=2), "real", "fake", "base")
        read = run.predict(self.renoise(run, part, key, q.read_from, draw=3), "guide", "base")
        real, fake, base = (clean(seen.rows, seen.rows.predictions[name]) for name in ("real", "fake", "base"))
        guide, start = (clean(read.rows, read.rows.predictions[name]) for name in ("guide", "base"))
        part = part.with_predictions(real=real, kl=base - fake, cfg=real - base, guide=guide, rl=guide - start)
        led = part.rows.place % part.used.shape[1] < (q.steps or self.sampling.steps)
        yield run.update(part.with_rows(context=led), self.loss)

    def renoise(self, run: "Run", part: "Items", key: Key, lowest: float = 0.0, **draw: Any) -> "Items":
        """Return the renoised end of each step, with the clean sample that the student predicted."""
        rows, draw["lowest"] = part.rows, part.rows.level_next.clamp(min=lowest)
        noisy = run.renoise(part, rows.x_next, rows.level_next, self.levels, key, **draw)
        return noisy.with_predictions(x0=clean(rows, rows.predictions["old"]))

    def fake_loss(self, v: Tensor, rows: RenoisedSamples) -> tuple[Tensor, FakeInfo]:
        """Return the error of the velocity from the student's clean sample, with the distance to the base."""
        error = velocity_error(v, (rows.x - rows.predictions["x0"]) / per_sample(rows.level, v))
        return error + self.fake_kl * velocity_error(v, rows.predictions["base"]), FakeInfo(error.detach())

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, MatchInfo]:  # type: ignore[override]
        """Return the sum of the three matching losses; steps without the surrogate's guidance have only the teacher's."""
        assert rows.context is not None
        p, x0 = rows.predictions, clean(rows, v)
        match = partial(matching_loss, x0, form=self.form, huber=self.huber)
        kl, cfg, rl = match(p["kl"], p["real"]), match(p["cfg"], p["real"]), match(p["rl"], p["guide"])
        led, alone = self.tdm * cfg + (1 - self.tdm) * rl + kl, self.tdm * (cfg + kl)
        return torch.where(rows.context, led, alone), MatchInfo((p["kl"] ** 2).flatten(1).mean(1))
