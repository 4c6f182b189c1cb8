"""TDM: trajectory matching of a few-step deterministic student with its teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core.checks import per_sample
from fluvial.core.distill import MatchForm, noise_weight, snr_weight
from fluvial.core.random import Key
from fluvial.engines.methods.losses import RewardTermConfig
from fluvial.engines.methods.matching import FakeInfo, Matching
from fluvial.engines.run.method import Needs
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RenoisedSamples
from fluvial.engines.sampling.noising import Levels, UniformLevels
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.sampling.window import OneRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


@dataclass(frozen=True)
class Tdm(Matching, name="tdm"):
    """TDM: the ends of the student's few ODE steps are matched to the teacher's samples of that level (arXiv 2503.06674).

    Args:
        sampling: How the student samples: few steps of the ODE, without guidance.
        trained: Which steps are matched.
        fake_updates: Number of updates of the fake per update of the student, each on all samples with new noise.
        interval: Levels at which a step from s to s' is compared: separate (between s' and s) or reverse (between s' and 1).
        levels: Distribution of the position in the interval, from 0 to 1.
        snr_max: Upper bound of the signal-to-noise ratio that weights the fake's error.
        reward_term: Term of a differentiable reward.
    """

    follows_ode = True
    bounds = {**Matching.bounds, "snr_max": (1e-12, 1e12)}  # noqa: RUF012
    sampling: SamplingConfig = SamplingConfig(prompts=64, group=1, steps=4, sampler=Ode())
    trained: TrainedSteps = OneRecorded("sample")
    fake_updates: int = 1
    interval: Literal["separate", "reverse"] = "separate"
    levels: Levels = UniformLevels(0.02, 0.98)
    snr_max: float = 5.0
    form: MatchForm = "huber"
    reward_term: RewardTermConfig = RewardTermConfig()

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Only the reward term needs a reward."""
        return replace(Matching.needs, rewards="gradients" if self.reward_term.coef else None)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake to the ends of the student's steps, then update the student."""
        steps = run.record_steps(batch, key, trained=self.trained, keep=run.grade(batch).keep)
        (part,) = run.minibatches(steps, key, self.passes)
        for number in range(1, self.fake_updates + 1):
            run.update(self.renoise(run, part, key, number), self.fake_loss, network="fake")
        part = self.correct(run, part, self.renoise(run, part, key))
        yield run.update(part, partial(self.loss, reward=self.reward_term.bind(run, part)))

    def renoise(self, run: "Run", part: "Items", key: Key, draw: int = 0) -> "Items":
        """Return the renoised end of each step, with the clean sample and the noise that the student predicted."""
        rows = part.rows
        highest = rows.level if self.interval == "separate" else None
        noisy = run.renoise(part, rows.x_next, rows.level_next, self.levels, key, highest=highest, draw=draw)
        level, v = per_sample(rows.level, rows.x), rows.predictions["old"]
        return noisy.with_predictions(x0=rows.x - level * v, noise=rows.x + (1 - level) * v)

    def fake_loss(self, v: Tensor, rows: RenoisedSamples) -> tuple[Tensor, FakeInfo]:
        """Return the error of the clean sample, weighted by signal-to-noise ratio and by the likelihood of its noise."""
        error = velocity_error(rows.x - per_sample(rows.level, v) * v, rows.predictions["x0"])
        likely = noise_weight(rows.predictions["noise"], rows.noise, rows.start_level, rows.level)
        return likely * snr_weight(rows.level, largest=self.snr_max) * error, FakeInfo(error.detach())
