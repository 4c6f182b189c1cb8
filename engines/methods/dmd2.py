"""DMD2: a few-step student whose noised samples a teacher and a model of the student itself cannot tell apart."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fluvial.core.random import Key
from fluvial.engines.methods.losses import Gan, HeadGan, NoGan, RewardTermConfig
from fluvial.engines.methods.matching import Matching, clean
from fluvial.engines.run.declared import Networks, Trained
from fluvial.engines.run.method import Needs
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.noising import Levels, UniformLevels
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import OneRecorded
from fluvial.engines.sampling.window import Trained as TrainedSteps

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class Dmd2(Matching, name="dmd2"):
    """DMD2: the student's clean samples, with noise on them, look alike to the teacher and to the fake (arXiv 2405.14867).

    The student takes few steps, each to the clean sample that it predicts and back to a lower level with new noise. One of
    them has a gradient. With `gan` a head of the fake learns to tell the samples from given images, and the student to
    deceive it; the prompts are then the captions of these images.

    Args:
        sampling: How the student samples: few steps of cps at eta 1, without guidance.
        trained: Which step has the gradient: the same of all samples, as published, or one of each.
        fake_updates: Number of its updates per update of the student, each on its share of the samples.
        levels: Noise levels at which teacher and fake are compared; `ShiftedLevels` are Self-Forcing's.
        fake_levels: Noise levels at which the fake is trained.
        reward_term: Term of a differentiable reward.
        gan: Adversarial term on given images: `NoGan` or `HeadGan`.
    """

    serving_solver = "consistency"
    shares = True
    sampling: SamplingConfig = SamplingConfig(prompts=80, group=1, steps=4, sampler=Stochastic("cps", eta=1.0))
    trained: TrainedSteps = OneRecorded("rollout")
    guidance: float = 4.0
    fake_updates: int = 5
    levels: Levels = UniformLevels(0.02, 0.98)
    fake_levels: Levels = UniformLevels()
    reward_term: RewardTermConfig = RewardTermConfig()
    gan: Gan = NoGan()

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Learn from no reward but that of the term, and from images with an adversary."""
        needs, opposed = Matching.needs, isinstance(self.gan, HeadGan)
        return replace(
            needs, rewards="gradients" if self.reward_term.coef else None, images=opposed, graphs=needs.graphs + opposed
        )

    def networks(self) -> Networks:
        """Keep the teacher, and the model of the student's samples, which learns, and has a head with an adversary."""
        return {**super().networks(), "fake": Trained(self.fake, head=isinstance(self.gan, HeadGan))}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake to the student's samples; then move the student on the last of them, before the fake learns these."""
        images = self.gan.read(run, batch, key)
        for number, part in enumerate(self.split(run, batch, key, self.fake_updates, **images), start=1):
            x0, zero = clean(part.rows, part.rows.predictions["old"]), part.rows.level * 0
            noise = partial(run.renoise, part, level=zero, levels=self.fake_levels, key=key)
            if number == self.fake_updates:
                items = self.correct(run, part, run.renoise(part, x0, zero, self.levels, key))
                items = self.gan.oppose(run, items, x0, partial(noise, draw=number + 1), "fake")
                reward = self.reward_term.bind(run, part)
                yield run.update(items, partial(self.loss, reward=lambda *at, r=reward: r(*at) + self.gan.fool(*at)))
            run.update(*self.gan.judge(run, part, x0, partial(noise, draw=number), "fake", self.fake_loss), network="fake")
