"""Recipes of students of few steps, and of methods that follow the gradient of a reward."""

from typing import Any

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.methods import AcDmd, Dmd2, Refl, Rtdmd, Srpo, Tdm, TdmR1
from fluvial.engines.methods.losses import RewardTermConfig
from fluvial.engines.methods.surrogate import SurrogateConfig
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.recipes.base import CONSISTENCY, HANDWRITING, ONE_UPDATE, of_model, of_published
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps


def dmd2(model: str = HANDWRITING) -> TrainConfig:
    """DMD2 (arXiv 2405.14867): a student of four noisy steps whose samples a teacher cannot tell from its own.

    The teacher is the model itself with guidance. The settings of large models are those of the published run
    flow_factory/sd3.5-medium/dmd2, whose student takes ODE steps; the sampler is that of DMD2's own code. On handwriting
    the student takes two steps. Rewards are measured, not learnt from.
    """
    sampling = SamplingConfig(prompts=160, group=1, steps=2, sampler=CONSISTENCY)
    return of_published(
        "flow_factory/sd3.5-medium/dmd2",
        model,
        **{**ONE_UPDATE, "optimizer.lr": 2e-4},
        method=Dmd2(sampling=sampling, guidance=1.0, fake=OptimizerConfig(lr=1e-3, weight_decay=1e-4)),
    )


def ac_dmd(model: str = HANDWRITING) -> TrainConfig:
    """AC-DMD (arXiv 2605.26108): DMD where each noisy step of a student of four ends; RTDMD begins from such a student.

    The teacher is the model itself with guidance. The settings of large models are those of the published run
    rtdmd/sd3.5-medium/cold-start. On handwriting the student takes two steps. Rewards are measured, not learnt from.
    """
    sampling = SamplingConfig(prompts=160, group=1, steps=2, sampler=Stochastic("cps", eta=0.9))
    return of_published(
        "rtdmd/sd3.5-medium/cold-start",
        model,
        **{**ONE_UPDATE, "optimizer.lr": 2e-4},
        method=AcDmd(sampling=sampling, guidance=1.0, fake=OptimizerConfig(lr=1e-3, weight_decay=0.0), fake_updates=5),
    )


def tdm(model: str = HANDWRITING) -> TrainConfig:
    """TDM (arXiv 2503.06674): a student of four ODE steps, each ending where the teacher's samples of that level are.

    The teacher is the model itself with guidance. The settings of large models are those of the published run
    flow_factory/sd3.5-medium/tdm, without its bounds of the noise's weight. On handwriting the student takes two steps.
    Rewards are measured, not learnt from.
    """
    sampling = SamplingConfig(prompts=128, group=1, steps=2, sampler=Ode())
    return of_published(
        "flow_factory/sd3.5-medium/tdm",
        model,
        **{**ONE_UPDATE, "optimizer.lr": 2e-4},
        method=Tdm(sampling=sampling, guidance=1.0, fake=OptimizerConfig(lr=1e-3, weight_decay=1e-4), form="dmd"),
    )


def tdm_r1(model: str = HANDWRITING) -> TrainConfig:
    """TDM-R1 (arXiv 2603.07700): a student of four ODE steps that learns from any reward through a surrogate.

    The settings of large models are those of the published run tdm_r1/sd3.5-medium/ocr, whose student continues from a TDM
    adapter (`lora.weights`); the time-shift of the surrogate's levels is left out. On handwriting the student takes two
    steps.
    """
    fast = OptimizerConfig(lr=1e-3)
    return of_published(
        "tdm_r1/sd3.5-medium/ocr",
        model,
        **{**ONE_UPDATE, "optimizer.lr": 2e-4},
        method=TdmR1(
            sampling=SamplingConfig(prompts=16, group=8, steps=2, sampler=Ode()),
            guidance=1.0,
            fake=fast,
            surrogate=SurrogateConfig(fast, guidance=1.0),
        ),
    )


def rtdmd(model: str = HANDWRITING) -> TrainConfig:
    """RTDMD (arXiv 2605.26108): a few-step student that learns from rewards, and is matched to its teacher at its last step.

    The settings of large models are those of the published run rtdmd/sd3.5-medium/multi-reward, the second stage, which
    begins from a student of its own first stage, and adds `reward_term.coef` 1e-4 and `reward_term.margin` 3 for
    differentiable rewards. On handwriting the reward is likeness, a density of real digits.
    """
    sampling = SamplingConfig(prompts=16, group=8, steps=4, sampler=Stochastic("cps", eta=0.9))
    return of_published(
        "rtdmd/sd3.5-medium/multi-reward",
        model,
        **{**ONE_UPDATE, "optimizer.lr": 5e-4},
        method=Rtdmd(
            sampling=sampling,
            clip=1e-3,
            guidance=1.0,
            coef=2e-3,
            fake=OptimizerConfig(lr=1e-3, weight_decay=0.0),
            reward_term=RewardTermConfig(0.06),
        ),
        rewards=("likeness",),
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
