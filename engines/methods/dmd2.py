"""DMD2: distills a few-step student by matching the noised samples of student and teacher."""

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
    """DMD2: the teacher and a model of the student (fake) predict alike at noised student samples (arXiv 2405.14867).

    The student takes few steps, each to its predicted clean sample and back to a lower level with new noise. One of these
    steps has a gradient. With `gan` a head on the fake learns to tell samples from images of a dataset, and the student to
    fool it; the prompts are then the captions of these images.

    Args:
        sampling: How the student samples: few steps of cps at eta 1, without guidance.
        trained: Which step has the gradient: the same for all samples, as published, or one drawn per sample.
        fake_updates: Number of updates of the fake per update of the student, each on an equal part of the samples.
        levels: Noise levels at which teacher and fake are compared; Self-Forcing uses `ShiftedLevels`.
        fake_levels: Noise levels at which the fake is trained.
        reward_term: Term of a differentiable reward.
        gan: Adversarial term with images of a dataset: `NoGan` or `HeadGan`.
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
        """The reward term needs a reward, and the adversarial term images and one more graph."""
        needs, has_gan = Matching.needs, isinstance(self.gan, HeadGan)
        return replace(
            needs, rewards="gradients" if self.reward_term.coef else None, images=has_gan, graphs=needs.graphs + has_gan
        )

    def networks(self) -> Networks:
        """Declare the teacher, and the fake, which has a head if there is an adversarial term."""
        return {**super().networks(), "fake": Trained(self.fake, head=isinstance(self.gan, HeadGan))}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Fit the fake to the student's samples; update the student on their last part, before the fake is fitted to it."""
        images = self.gan.read_images(run, batch, key)
        for number, part in enumerate(self.split(run, batch, key, self.fake_updates, **images), start=1):
            x0, zero = clean(part.rows, part.rows.predictions["old"]), part.rows.level * 0
            noise = partial(run.renoise, part, level=zero, levels=self.fake_levels, key=key)
            if number == self.fake_updates:
                items = self.correct(run, part, run.renoise(part, x0, zero, self.levels, key))
                items = self.gan.differentiate_head(run, items, x0, partial(noise, draw=number + 1), "fake")
                reward = self.reward_term.bind(run, part)
                yield run.update(items, partial(self.loss, reward=lambda *at, r=reward: r(*at) + self.gan.get_term(*at)))
            run.update(
                *self.gan.add_term(run, part, x0, partial(noise, draw=number), "fake", self.fake_loss), network="fake"
            )
