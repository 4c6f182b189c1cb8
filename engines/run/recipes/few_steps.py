"""Recipes of students of few steps, and of methods that follow the gradient of a reward."""

from dataclasses import replace
from typing import Any

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.methods import Dmd2, Refl, Rtdmd, Srpo, Tdm, TdmR1
from fluvial.engines.methods.losses import RewardTermConfig
from fluvial.engines.methods.surrogate import SurrogateConfig
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.recipes.base import CONSISTENCY, HANDWRITING, ONE_UPDATE, of_model, of_published
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.noising import LogitNormalLevels
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllRecorded, AllSteps
from fluvial.engines.scoring.advantages import AdvantageConfig


def dmd2(model: str = HANDWRITING) -> TrainConfig:
    """DMD2 (arXiv 2405.14867): a student of four noisy steps whose samples a teacher cannot tell from its own.

    The teacher is the model itself with guidance. Numbers of large models are those of Flow-Factory's run on SD3.5,
    whose student takes ODE steps; the sampler is that of DMD2's own code. On handwriting the student takes two steps.
    Rewards are measured, not learnt from.
    """
    fake = OptimizerConfig(lr=1e-5, weight_decay=1e-4)
    return of_model(
        model,
        Dmd2(sampling=SamplingConfig(prompts=2560, group=1, steps=4, sampler=CONSISTENCY), fake=fake),
        tuned={
            **ONE_UPDATE,
            "method": Dmd2(
                sampling=SamplingConfig(prompts=160, group=1, steps=2, sampler=CONSISTENCY),
                guidance=1.0,
                fake=replace(fake, lr=1e-3),
            ),
            "optimizer.lr": 2e-4,
            "optimizer.ema_decay": 0.9,
        },
        **{"optimizer.lr": 1e-5, "optimizer.ema_decay": 0.0},
    )


def tdm(model: str = HANDWRITING) -> TrainConfig:
    """TDM (arXiv 2503.06674): a student of four ODE steps, each of which ends where the teacher's samples of that level are.

    The teacher is the model itself with guidance. Numbers of large models are those of Flow-Factory's run on SD3.5,
    without its bounds of the noise's weight. On handwriting the student takes two steps. Rewards are measured, not learnt
    from.
    """
    fake = OptimizerConfig(lr=1e-5, weight_decay=1e-4)
    sampling = SamplingConfig(prompts=128, group=1, steps=4, sampler=Ode())
    return of_model(
        model,
        Tdm(
            sampling=sampling, trained=AllRecorded(), guidance=4.0, fake=fake, interval="reverse", levels=LogitNormalLevels()
        ),
        tuned={
            **ONE_UPDATE,
            "method": Tdm(sampling=replace(sampling, steps=2), guidance=1.0, fake=replace(fake, lr=1e-3), form="dmd"),
            "optimizer.lr": 2e-4,
            "optimizer.ema_decay": 0.9,
        },
        **{"optimizer.lr": 1e-5, "optimizer.ema_decay": 0.0},
    )


def tdm_r1(model: str = HANDWRITING) -> TrainConfig:
    """TDM-R1 (arXiv 2603.07700): a student of four ODE steps that learns from any reward through a surrogate.

    Numbers of large models are those of its OCR run on SD3.5, whose student continues from a TDM adapter (`lora.weights`);
    the time-shift of the surrogate's levels is left out. On handwriting the student takes two steps.
    """
    fast = OptimizerConfig(lr=3e-4, betas=(0.0, 0.999), weight_decay=1e-4)
    learns = SurrogateConfig(replace(fast, betas=(0.9, 0.999)))
    small = replace(learns, optimizer=OptimizerConfig(lr=1e-3), guidance=1.0)
    return of_model(
        model,
        TdmR1(fake=fast, surrogate=learns),
        tuned={
            **ONE_UPDATE,
            "method": TdmR1(
                sampling=SamplingConfig(prompts=16, group=8, steps=2, sampler=Ode()),
                guidance=1.0,
                fake=OptimizerConfig(lr=1e-3),
                surrogate=small,
            ),
            "optimizer.lr": 2e-4,
            "optimizer.betas": (0.9, 0.999),
        },
        **{"optimizer.lr": 7.5e-5, "optimizer.betas": (0.0, 0.999)},
    )


def rtdmd(model: str = HANDWRITING) -> TrainConfig:
    """RTDMD (arXiv 2605.26108): a few-step student that learns from rewards, and is matched to its teacher at its last step.

    Numbers of large models are those of the second stage of its run on SD3.5, which begins from a student of its own first
    stage, and adds `reward_term.coef` 1e-4 and `reward_term.margin` 3 for differentiable rewards. On handwriting the reward
    is likeness, a density of real digits.
    """
    fake, term = OptimizerConfig(lr=3e-5, weight_decay=0.0), RewardTermConfig(0.03)
    sampling = SamplingConfig(prompts=48, group=24, steps=4, sampler=Stochastic("cps", eta=0.9))
    return of_model(
        model,
        Rtdmd(sampling=sampling, advantage=AdvantageConfig(scale="batch", combine="advantages"), fake=fake),
        tuned={
            **ONE_UPDATE,
            "method": Rtdmd(
                sampling=replace(sampling, prompts=16, group=8),
                clip=1e-3,
                guidance=1.0,
                fake=replace(fake, lr=1e-3),
                reward_term=term,
            ),
            "optimizer.lr": 5e-4,
            "rewards": ("likeness",),
        },
        **{"optimizer.lr": 3e-6},
    )


def refl(model: str = HANDWRITING) -> TrainConfig:
    """ReFL (arXiv 2304.05977): the gradient of a differentiable reward of what one of the last ten steps predicts.

    Numbers of large models are those of its run on SD1.4, which trains all weights. On handwriting the step is one of the
    last four, and the reward is likeness, a density of real digits, without a margin.
    """
    sampling = SamplingConfig(prompts=128, group=1, sampler=Ode(), window=AllSteps(low=6))
    return of_model(
        model,
        Refl(margin=2.0, scale=1e-3),
        tuned={
            **ONE_UPDATE,
            "method": Refl(sampling=sampling),
            "optimizer.lr": 5e-4,
            "rewards": ("likeness",),
            "train": "lora",
        },
        **{"optimizer.lr": 1e-5, "optimizer.weight_decay": 1e-2, "train": "full"},
    )


def srpo(model: str = HANDWRITING) -> TrainConfig:
    """SRPO (arXiv 2509.06942): a reward relative to an opposite description, of images recovered from any noise level.

    The settings of large models are those of the published run srpo/flux.1-dev/hpsv2. On handwriting the reward is
    likeness, without words: then the steps away from the image have a negative weight, so that both branches agree.
    """
    small = SamplingConfig(prompts=128, group=1, sampler=Ode())
    levels: dict[str, Any] = {"highest": 0.9, "lowest": 0.3, "towards": (1.0, 1.0), "away": (-1.0, -1.0), "margin": 100.0}
    return of_published(
        "srpo/flux.1-dev/hpsv2",
        model,
        **ONE_UPDATE,
        method=Srpo(sampling=small, wanted=("",), unwanted=("",), **levels),
        rewards=("likeness",),
    )
