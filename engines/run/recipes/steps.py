"""Recipes of methods that give the steps of a rollout rewards, gradients or preferences of their own."""

import math
from dataclasses import fields, replace
from typing import Any

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.methods import (
    AdjointMatching,
    BranchGrpo,
    ChunkGrpo,
    ConstantMargin,
    DenseGrpo,
    Grpo,
    NoiseMargin,
    Spo,
    TurningPointGrpo,
)
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.run.method import Method
from fluvial.engines.run.recipes.base import (
    BATCH,
    HANDWRITING,
    NOISIEST,
    ONE_UPDATE,
    TWO,
    UNET,
    of_model,
    of_published,
)
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import Candidates, RandomWindow, Splits, StratifiedRecorded
from fluvial.engines.scoring.advantages import AdvantageConfig


def chunk(model: str = HANDWRITING) -> TrainConfig:
    """GRPO with one ratio for all recorded steps of a sample: ours, after that of GSPO for a text (arXiv 2507.18071).

    The settings of large models are those of the published run flow_grpo/sd3.5-medium/ocr, whose clip is per step. On
    handwriting they are those of grpo.
    """
    config = of_published("flow_grpo/sd3.5-medium/ocr", model, method=Grpo(sampling=NOISIEST, advantage=BATCH, passes=TWO))
    known = _fields_of(config.method)
    return replace(
        config, method=ChunkGrpo(**{each.name: known[each.name] for each in fields(ChunkGrpo) if each.name in known})
    )


def densegrpo(model: str = HANDWRITING) -> TrainConfig:
    """DenseGRPO (arXiv 2601.20218): a reward for every step, the gain of what the ODE makes of the sample by that step.

    Large models have 10 steps and groups of 24, and otherwise the numbers of Flow-GRPO's run on text; the calibration of
    the noise of each step is left out. On handwriting a window of 3 steps within the six noisiest, so that its 4 rewards per
    sample cost about 17 more passes.
    """
    steps = SamplingConfig(prompts=16, group=8, window=RandomWindow(3, high=6))
    config = of_published("flow_grpo/sd3.5-medium/ocr", model, method=Grpo())
    if model in MODELS:
        return replace(config, method=DenseGrpo(sampling=steps, advantage=BATCH, passes=TWO))
    known: Any = config.method
    # The advantages of a step are compared within their group alone.
    advantage = replace(known.advantage, scale="group")
    return replace(config, method=DenseGrpo(**{**_fields_of(known), "advantage": advantage}))


def tpgrpo(model: str = HANDWRITING) -> TrainConfig:
    """TP-GRPO (arXiv 2602.06422): a reward for every step; one where a sample turns to the better gets all that follows.

    The settings of large models are those of the published run tp_grpo/sd3.5-medium/pickscore: 9 steps of cps at eta 0.7.
    On handwriting a window of 3 steps within the six noisiest.
    """
    steps = SamplingConfig(prompts=16, group=8, window=RandomWindow(3, high=6))
    method = TurningPointGrpo(sampling=steps, advantage=BATCH, passes=TWO)
    return of_published("tp_grpo/sd3.5-medium/pickscore", model, method=method)


def branchgrpo(model: str = HANDWRITING) -> TrainConfig:
    """BranchGRPO (arXiv 2509.06040): paths that split on their way, compared edge by edge with others of the same step.

    The settings of large models are those of the published run branchgrpo/flux.1-dev/hpsv2: 20 steps of dance_sde at eta
    0.3, of which 4 split in two, two trees on each of 8 GPUs, and one update per rollout. On handwriting trees of 8 that
    split at the first 3 of the 6 noisiest steps.
    """
    small = SamplingConfig(16, 8, sampler=Stochastic("dance_sde"), window=Splits((0, 1, 2), high=6))
    method = BranchGrpo(sampling=small, advantage=AdvantageConfig(eps=1e-8, clip=5.0), passes=TWO)
    return of_published("branchgrpo/flux.1-dev/hpsv2", model, method=method)


def spo(model: str = UNET) -> TrainConfig:
    """SPO (arXiv 2406.04314): a preference between the best and the worst of four candidates for each next state.

    The settings of large models are those of the published run spo/sd1.5/4k-prompts. Its step-aware preference model is not
    offered: a candidate has the rewards of the clean sample that is predicted from it. On handwriting-unet 4 candidates at
    the first 8 of 10 steps, and beta 100, because the log-ratios are per dimension.
    """
    small = SamplingConfig(32, 4, sampler=Stochastic("ddim", eta=1.0), window=Candidates(high=8))
    return of_published(
        "spo/sd1.5/4k-prompts",
        model,
        **ONE_UPDATE,
        method=Spo(sampling=small, beta=100.0, margin=ConstantMargin(0.05)),
        optimizer=OptimizerConfig(lr=2e-3, schedule="cosine", ema_decay=0.9),
    )


def lpo(model: str = UNET) -> TrainConfig:
    """LPO (arXiv 2502.01051): SPO from the first step on, with a margin that grows with the noise of the step.

    Large models have the numbers of the authors' run on SD 1.5, with SPO's batch; its reward model of noisy latents is not
    offered, see `spo`. On handwriting-unet the margin is smaller.
    """
    large = {"method.sampling.window": Candidates(), "method.beta": 500.0, "method.margin": NoiseMargin()}
    return with_values(spo(model), {"method.margin": NoiseMargin(0.02, 0.1)} if model in MODELS else large)


def adjoint(model: str = HANDWRITING) -> TrainConfig:
    """Adjoint Matching (arXiv 2409.08861): steps fitted to a differentiable reward's gradient, which the base carries back.

    Large models have the numbers of the authors' code for SD 1.5 and ImageReward (microsoft/soc-fine-tuning-sd): 50 DDIM
    steps, of which 4 are trained on, full fine-tuning in float32, without clipping of the gradient. Their noise schedule,
    which they changed, is the model's own here. On handwriting flow_sde takes 10 steps towards likeness, with the exact
    adjoint.
    """
    guidance = Guidance(7.5, update="conditional")
    sampling = SamplingConfig(125, 1, 50, guidance=guidance, sampler=Stochastic("ddim", eta=1.0))
    memoryless = SamplingConfig(prompts=128, group=1, sampler=Stochastic(eta=math.sqrt(2)))
    tuned = AdjointMatching(sampling=memoryless, trained=StratifiedRecorded(), scale=20.0)
    optimizer = OptimizerConfig(lr=3e-6, betas=(0.9, 0.95), warmup=20, max_grad_norm=1e9)
    engine = MachineConfig(micro_batch=5, compute="float32")
    return of_model(
        model,
        AdjointMatching(sampling=sampling, trained=StratifiedRecorded(), index="current"),
        tuned={**ONE_UPDATE, "method": tuned, "rewards": ("likeness",)},
        **({} if model in MODELS else {"train": "full", "optimizer": optimizer, "engine": engine}),
    )


def _fields_of(method: Method) -> dict[str, Any]:
    """Return the hyper-parameters of a method by name, for one that extends it."""
    return {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
