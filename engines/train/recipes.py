"""Recipes: functions that return a run, from which the command line makes its flags.

Each has settings for large models and others for the built-in ones, which train in minutes on a CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluvial.engines.fsdp.optimizer import OptimizerConfig
from fluvial.engines.objectives.advantages import AdvantageConfig
from fluvial.engines.objectives.losses import KLConfig
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import Awm, Clipped, Distill, Dpo, Dppo, Guard, Nft, Raft, Sft
from fluvial.engines.rollout.config import RolloutConfig
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.engines.train.config import BUILT_IN, TrainConfig
from fluvial.models import LoraConfig

HANDWRITING, UNET = BUILT_IN
# On the built-in models every recipe makes 50 rollouts of 128 samples; these make one update per rollout, the others two.
ONE_UPDATE = {"minibatches": 1, "updates": 50, "eval_every": 10}
# Shared by the policy gradients: Flow-GRPO's published rollout for SD3.5-M, and for handwriting a random window of 5
# stochastic steps within the six noisiest, which decide what is written.
PUBLISHED = RolloutConfig(prompts=48, group=24, eta=0.7, guidance=Guidance(scale=4.5))
NOISIEST = RolloutConfig(prompts=16, group=8, window=5, window_high=6)
PUBLISHED_ADVANTAGE, BATCH = AdvantageConfig(scale="batch", clip=5.0), AdvantageConfig(scale="batch")
# For objectives that need no log-probabilities.
ODE = RolloutConfig(prompts=16, group=8, sampler="ode", eta=0.0)


def grpo(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the stochastic steps of a flow, in groups.

    The settings are those of the published OCR run on SD3.5-M (flow_grpo, general_ocr_sd3): eta 0.7, guidance 4.5, 48
    prompts of 24 samples, two updates per rollout, advantages divided by the batch's standard deviation and clipped at
    5, clip range 1e-4, KL 0.04, LoRA of rank 32 at learning rate 3e-4. On handwriting a random window of 5 stochastic
    steps lies within the six noisiest, which decide what is written (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802), with 16
    prompts of 8 samples, no KL, and a learning rate that falls to 0. Full fine-tuning needs another learning rate and a
    KL there: train full, optimizer.lr 2e-4, kl.coef 0.1.
    """
    return _recipe(
        model,
        Clipped(clip_low=1e-4, clip_high=1e-4),
        PUBLISHED,
        advantage=PUBLISHED_ADVANTAGE,
        kl=KLConfig(coef=0.04),
        minibatches=2,
        tuned={
            "objective": Clipped(),
            "rollout": NOISIEST,
            "advantage": BATCH,
            "kl": KLConfig(),
        },
    )


def dance(model: str = HANDWRITING) -> TrainConfig:
    """DanceGRPO (arXiv 2505.07818): GRPO on a reverse SDE with a constant noise rate, trained on a part of the steps.

    As published for FLUX (XueZeyue/DanceGRPO, 16 GPUs): eta 0.3, groups of 12 samples that start from the same noise, 60
    % of the 16 steps, no KL, clip range 1e-4, full fine-tuning at learning rate 1e-5. Prompts per rollout are the
    paper's 32. On handwriting it trains LoRA, with eta 0.8, on the noisier steps alone.
    """
    return _recipe(
        model,
        Clipped(clip_low=1e-4, clip_high=1e-4),
        RolloutConfig(prompts=32, group=12, shared_noise=True, steps=16, sampler="dance_sde", eta=0.3, fraction=0.6),
        advantage=AdvantageConfig(clip=5.0),
        train="full",
        optimizer=OptimizerConfig(lr=1e-5, weight_decay=1e-4),
        tuned={
            "objective": Clipped(),
            "rollout": RolloutConfig(
                prompts=16, group=8, shared_noise=True, sampler="dance_sde", eta=0.8, window=7, window_high=7, fraction=0.7
            ),
            "train": "lora",
        },
    )


def cps(model: str = HANDWRITING) -> TrainConfig:
    """Flow-CPS (arXiv 2509.05952): GRPO with steps that preserve the path's coefficients, so that no surplus noise is left.

    Settings of flow_grpo's fast run without guidance: eta 0.8, a window of 3 steps in the first half, the negative
    squared error as log-probability (rollout.form unscaled), clip range 1e-5, no KL, 24 samples per prompt. The authors'
    own runs (IamCreateAI/FlowCPS) take all steps with eta 0.7 or 0.9. On handwriting the log-probability is the true
    density.
    """
    return _recipe(
        model,
        Clipped(clip_low=1e-5, clip_high=1e-5),
        RolloutConfig(prompts=48, group=24, sampler="cps", eta=0.8, window=3, window_high=5, form="unscaled"),
        advantage=PUBLISHED_ADVANTAGE,
        minibatches=2,
        tuned={
            "objective": Clipped(),
            "rollout": replace(NOISIEST, sampler="cps", eta=0.8),
            "advantage": BATCH,
        },
    )


def guard(model: str = HANDWRITING) -> TrainConfig:
    """GRPO-Guard (arXiv 2510.22319): a ratio that is centred and scaled so that every step's gradient has the same size.

    The clip range is the published 2e-6; the rest is as in grpo, without the KL. The published run divides advantages by
    the group's standard deviation and trains at learning rate 1e-4. On handwriting the clip range is 1e-3.
    """
    return _recipe(
        model,
        Guard(clip=2e-6),
        PUBLISHED,
        advantage=PUBLISHED_ADVANTAGE,
        minibatches=2,
        tuned={
            "objective": Guard(clip=1e-3),
            "rollout": NOISIEST,
            "advantage": BATCH,
        },
    )


def dppo(model: str = HANDWRITING) -> TrainConfig:
    """Flow-DPPO (arXiv 2606.11025): the exact KL of a step, in place of a clipped ratio, decides which pairs are held back.

    The KL threshold is the published 1e-5 nats per dimension; the rest is as in grpo, without the KL term. On
    handwriting the threshold is 1e-4.
    """
    return _recipe(
        model,
        Dppo(kl_threshold=1e-5),
        PUBLISHED,
        advantage=PUBLISHED_ADVANTAGE,
        minibatches=2,
        tuned={
            "objective": Dppo(kl_threshold=1e-4),
            "rollout": NOISIEST,
            "advantage": BATCH,
        },
    )


def ddpo(model: str = UNET) -> TrainConfig:
    """DDPO (arXiv 2305.13301): a clipped policy gradient on DDIM steps of a model of epsilon; DPOK with a KL (2305.16381).

    As published for SD 1.4 (kvablack/ddpo-pytorch): 50 steps at eta 1, guidance 5, clip range 1e-4, advantages per
    prompt clipped at 5, LoRA at learning rate 3e-4. On handwriting-unet it takes 10 steps, the noisier ones stochastic,
    and a learning rate of 2e-3: at 5e-4, 50 updates end at 0.93 of the codes right, at 2e-3 above 0.99.
    """
    return _recipe(
        model,
        Clipped(clip_low=1e-4, clip_high=1e-4),
        RolloutConfig(prompts=16, group=16, steps=50, sampler="ddim", eta=1.0, guidance=Guidance(scale=5.0)),
        advantage=AdvantageConfig(clip=5.0),
        minibatches=2,
        tuned={
            **ONE_UPDATE,
            "objective": Clipped(),
            "rollout": RolloutConfig(prompts=16, group=8, sampler="ddim", eta=1.0, window=6, window_high=8),
            "advantage": BATCH,
            "optimizer": OptimizerConfig(lr=2e-3, schedule="cosine", ema_decay=0.9),
        },
    )


def nft(model: str = HANDWRITING) -> TrainConfig:
    """DiffusionNFT (arXiv 2509.16117): on noised samples of an ODE, towards good ones and away from bad ones.

    As published for SD3.5-M (NVlabs/DiffusionNFT, sd3_geneval): DPM-Solver++ 2M without guidance, 48 prompts of 24
    samples, beta 1, an old policy with decay min(0.001 n, 0.5), advantages clipped at 5, velocity KL 1e-4, LoRA at
    learning rate 3e-4. It trains on all 10 levels of the schedule, the published run on 9 random ones. The published OCR
    run has beta 0.1 and the decay 0.0075 (n - 75), at most 0.999. On handwriting it trains on 4 levels per sample.
    """
    return _recipe(
        model,
        Nft(beta=1.0),
        RolloutConfig(prompts=48, group=24, sampler="ode", eta=0.0, solver="dpmpp_2m"),
        advantage=AdvantageConfig(scale="batch"),
        noising=NoisingConfig(each=10),
        kl=KLConfig(coef=1e-4),
        tuned={
            **ONE_UPDATE,
            "objective": Nft(beta=1.0),
            "rollout": replace(ODE, solver="dpmpp_2m"),
            "noising": NoisingConfig(each=4),
            "kl": KLConfig(),
        },
    )


def awm(model: str = HANDWRITING) -> TrainConfig:
    """AWM (arXiv 2509.25050): a policy gradient whose log-probability is the matching error of samples with noise on them.

    The weighting ghuber is the published one; batch, clip range and learning rate are those of Flow-GRPO. The published
    runs sample with SA-Solver and have two KL terms. On handwriting the samples are the ODE's, with 4 levels per sample.
    """
    return _recipe(
        model,
        Awm(clip_low=1e-4, clip_high=1e-4),
        RolloutConfig(prompts=48, group=24, sampler="ode", eta=0.0),
        advantage=PUBLISHED_ADVANTAGE,
        noising=NoisingConfig(each=10),
        minibatches=2,
        tuned={
            **ONE_UPDATE,
            "objective": Awm(weighting="t"),
            "rollout": ODE,
            "advantage": BATCH,
            "noising": NoisingConfig(each=4),
        },
    )


def dpo(model: str = HANDWRITING) -> TrainConfig:
    """Diffusion-DPO (arXiv 2311.12908): fit the preferred of two samples more; online from a rollout, or from a folder.

    Online, the pairs are the best and the worst sample of each group. Offline, they come from a folder that `fluvial
    preferences` wrote (objective.preferences), as in the published runs, which train on pairs that people chose, with
    beta 2000 (paper, SD 1.5) or 5000 (code). On handwriting it is online, with groups of 8 and beta 100.
    """
    return _recipe(
        model,
        Dpo(beta=2000.0),
        RolloutConfig(prompts=64, group=8, sampler="ode", eta=0.0),
        noising=NoisingConfig(each=4),
        tuned={
            **ONE_UPDATE,
            "objective": Dpo(beta=100.0),
            "rollout": ODE,
            "noising": NoisingConfig(each=8),
        },
    )


def raft(model: str = HANDWRITING) -> TrainConfig:
    """RAFT (arXiv 2304.06767): flow matching on the best samples of each group.

    On handwriting with a velocity KL of 1: samples of few steps are paler than the data of pre-training. Without the KL,
    a model that learns from its own samples fades to blank images (from 0.51 of the codes right to none in 50 updates).
    """
    return _recipe(
        model,
        Raft(best=0.25),
        RolloutConfig(prompts=48, group=24, sampler="ode", eta=0.0),
        noising=NoisingConfig(each=4),
        tuned={
            **ONE_UPDATE,
            "rollout": replace(ODE, solver="dpmpp_2m"),
            "kl": KLConfig(coef=1.0),
        },
    )


def sft(model: str = HANDWRITING) -> TrainConfig:
    """Supervised fine-tuning: flow matching (arXiv 2210.02747) on the job's own data, as in pre-training."""
    return _recipe(
        model,
        Sft(),
        RolloutConfig(prompts=128, group=1, sampler="ode", eta=0.0),
        noising=NoisingConfig(each=1, levels="continuous"),
        tuned={
            **ONE_UPDATE,
            "noising": NoisingConfig(each=4, levels="continuous"),
            "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", ema_decay=0.9),
        },
    )


def distill(model: str = HANDWRITING, *, teacher: Path = Path("runs/grpo/weights")) -> TrainConfig:
    """On-policy distillation (arXiv 2306.13649): the student samples, a teacher says which step it would have taken.

    The teacher is a folder of weights (objective.teacher), by default what `fluvial train grpo` exports. Rewards are
    measured, not learnt from.
    """
    return _recipe(
        model,
        Distill(teacher=teacher),
        RolloutConfig(prompts=128, group=1, eta=0.7),
        tuned={**ONE_UPDATE, "rollout": RolloutConfig(prompts=128, group=1, window=5, window_high=6)},
    )


def handwriting(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) as `make train` runs it: 80 rollouts of 128 samples, one update each."""
    return replace(grpo(model), updates=80, minibatches=1, eval_every=20)


RECIPES: dict[str, Callable[..., TrainConfig]] = {
    "grpo": grpo,
    "dance": dance,
    "cps": cps,
    "guard": guard,
    "dppo": dppo,
    "ddpo": ddpo,
    "nft": nft,
    "awm": awm,
    "dpo": dpo,
    "raft": raft,
    "sft": sft,
    "distill": distill,
    "handwriting": handwriting,
}


def _recipe(
    model: str,
    objective: Objective,
    rollout: RolloutConfig,
    *,
    tuned: dict[str, Any] | None = None,
    **published: Any,
) -> TrainConfig:
    """Return a run.

    Args:
        model: what is trained.
        objective: objective of large models.
        rollout: rollout of large models.
        published: further settings of large models; by default LoRA of rank 32 at learning rate 3e-4.
        tuned: settings of the built-in models, where they differ from those of large models or from the shared ones below.
    """
    config = TrainConfig(
        Path("runs") / "x",
        **{
            "model": model, "objective": objective, "rollout": rollout, "train": "lora",
            "lora": LoraConfig(rank=32, alpha=64.0), "micro_batch": 8, "eval_samples": 32, "final_samples": 64,
            "optimizer": OptimizerConfig(lr=3e-4, weight_decay=1e-4, ema_decay=0.9), **published,
        },
    )  # fmt: skip
    if model not in (HANDWRITING, UNET):
        return config
    found: dict[str, Any] = {
        "train": "lora", "lora": LoraConfig(), "updates": 100, "minibatches": 2, "micro_batch": 128, "eval_every": 20,
        "eval_samples": 200, "final_samples": 1000,
        "optimizer": OptimizerConfig(lr=5e-4, schedule="cosine", ema_decay=0.9),
    }  # fmt: skip
    return replace(config, **{**found, **(tuned or {})})
