"""RTDMD: a policy gradient on the noisy steps of a few-step student, and distribution matching on its last step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fluvial.core.policy import PolicyInfo
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import RewardTermConfig
from fluvial.engines.methods.matching import Matching
from fluvial.engines.run.method import Needs, RecordedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.noising import Levels, UniformLevels
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import AllSteps, FirstRecorded
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import policy_loss

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Rtdmd(Matching, name="rtdmd"):
    """RTDMD's loss: reinforcement learning of a few-step student that stays sharp (arXiv 2605.26108).

        loss = (sum of the surrogates of the first steps + coef matching loss of the last one + reward term) / first

    The last step has no noise, and so no ratio. Its clean sample is matched to the teacher's, as in DMD2, and gets the
    reward term. All steps have the same weight. The fake is fitted to clean samples as in DMD2; in the published run it is
    also trained for self-consistency, and low levels have less weight, as in AC-DMD.

    Args:
        sampling: How the student samples: few steps of cps, without guidance.
        first: Number of first steps that have a surrogate.
        clip: Half-width of the clip of the ratio.
        coef: Weight of the matching loss.
        fake: Optimizer of the model of the student's samples, which is updated once before each update of the student.
        levels: Noise levels at which teacher and fake are compared.
        fake_levels: Noise levels at which the fake is trained.
        reward_term: Term of a differentiable reward of the last step's clean sample.
    """

    serving_solver = "consistency"
    bounds: ClassVar = {**Matching.bounds, "clip": (0, 1), "first": (1, 2**31), "coef": (0, math.inf)}
    sampling: SamplingConfig = SamplingConfig(steps=4, sampler=Stochastic("cps", eta=0.9))
    first: int = 2
    advantage: AdvantageConfig = AdvantageConfig()
    clip: float = 1e-5
    coef: float = 1e-3
    levels: Levels = UniformLevels(0.02, 0.98)
    fake_levels: Levels = UniformLevels()
    reward_term: RewardTermConfig = RewardTermConfig()

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The surrogate needs scores; the reward term needs gradients."""
        return replace(Matching.needs, rewards="gradients" if self.reward_term.coef else "scores", ratio=True)

    @property
    def rows(self) -> RecordedRows:
        """Record every step, including the last one, which has no density."""
        steps = self.sampling.steps
        return RecordedRows("unscaled", trained=FirstRecorded(max(min(self.first, steps - 1), 0.5) / steps))

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        sampling = self.sampling
        if self.first >= sampling.steps:
            yield UsageError("first", self.first, f"less than the {sampling.steps} steps: the last one is matched")
        if sampling.window != AllSteps():
            yield UsageError("sampling.window", sampling.window.kind, "all", "rtdmd trains on the first steps and the last")
        if not sampling.sampler.rule.last_step_is_deterministic:
            yield UsageError("sampling.sampler", sampling.sampler.kind, "cps", "the last step ends at the clean sample")
        yield from super().problems()

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake to the student's samples; then optimize the surrogate and the last step's matching in one update."""
        grades = run.grade(batch, self.advantage)
        steps = run.record_steps(batch, key, grades.advantage, keep=grades.keep)
        first, last = steps.take(slice(self.first)), steps.take(slice(-1, None))
        (part,), (end,) = (run.minibatches(items, key, self.passes) for items in (first, last))
        x0, zero = end.rows.x_next, end.rows.level * 0
        run.update(run.renoise(end, x0, zero, self.fake_levels, key, draw=1), self.fake_loss, network="fake")
        end = self.correct(run, end, run.renoise(end, x0, zero, self.levels, key))
        # The surrogate is a mean over `first` steps.
        term = replace(self.reward_term, coef=self.reward_term.coef / self.first)
        run.accumulate(end, partial(super().loss, reward=term.bind(run, end), coef=self.coef / self.first))
        yield run.update(part, self.loss)

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:  # type: ignore[override]
        """Return `kernels.policy_loss` of the recorded steps."""
        clips: dict[str, Any] = {"clip_low": self.clip, "clip_high": self.clip, "form": self.rows.form}
        pairs: dict[str, Any] = {"log_prob_old": rows.log_prob_old, "advantage": rows.signal}
        return policy_loss(rows.transition, rows.x, v, rows.x_next, **pairs, **clips)
