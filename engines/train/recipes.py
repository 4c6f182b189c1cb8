"""Recipes: a run is a frozen dataclass, built by a function here. The command line is generated from it."""

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
# On the built-in models most recipes make two updates of a rollout of 128 samples, and these one; all make 50 rollouts.
ONE_UPDATE = {"minibatches": 1, "updates": 50, "eval_every": 10}
# What the policy gradients have in common: as yifan123/flow_grpo publishes it for SD3.5-M, and on handwriting a random
# window of 5 stochastic steps within the six noisiest, which decide what is written.
PUBLISHED = RolloutConfig(prompts=48, group=24, eta=0.7, guidance=Guidance(scale=4.5))
NOISIEST = RolloutConfig(prompts=16, group=8, window=5, window_high=6)
PUBLISHED_ADVANTAGE, BATCH = AdvantageConfig(scale="batch", clip=5.0), AdvantageConfig(scale="batch")
# Without noise in the steps, for objectives that need no log-probabilities.
ODE = RolloutConfig(prompts=16, group=8, sampler="ode", eta=0.0)


def grpo(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470): the policy gradient of the stochastic steps of a flow, clipped, in groups.

    Published (yifan123/flow_grpo, SD3.5-M, OCR): 10 SDE steps at eta 0.7, guidance 4.5, 48 prompts of 24 samples and two
    updates on them, advantages over the batch's standard deviation clipped at 5, clip range 1e-4, KL 0.04 times |dt|, LoRA
    at 3e-4. On handwriting: a random window of 5 stochastic steps within the six noisiest, which decide what is written
    (Flow-GRPO-Fast; MixGRPO, 2507.21802), 16 prompts of 8 samples, no KL, a rate that falls to 0. Full fine-tuning wants
    another rate and a KL there: --train full --optimizer.lr 2e-4 --kl.coef 0.1.
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
    """DanceGRPO (arXiv 2505.07818): GRPO on a reverse SDE of constant noise, of which a part of the steps is trained on.

    Published (XueZeyue/DanceGRPO, FLUX): eta 0.3, 16 steps, groups of 12 that begin with the same noise, 60 % of the steps
    of each sample, no KL, clip range 1e-4, full fine-tuning at 1e-5. On handwriting LoRA, the noisier steps alone and eta
    0.8.
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
    """Flow-CPS (arXiv 2509.05952): GRPO on steps that keep the path's coefficients, so that no surplus noise is left.

    Published (yifan123/flow_grpo): eta 0.8, a window of 3 within the first half, the log-probability as the negative squared
    error (form unscaled), clip range 1e-5, no KL, no guidance, 24 samples a prompt. On handwriting the true density, whose
    gradient does not depend on the step's noise being 1: --rollout.form unscaled is the published one there too.
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
    """GRPO-Guard (arXiv 2510.22319): a ratio that is centred and scaled so that every step's gradient is of one size.

    Published: as Flow-GRPO, with a clip range of 2e-6. On handwriting a wider one.
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
    """Flow-DPPO (arXiv 2606.11025): the exact KL of a step decides which pairs are held back, in place of a clipped ratio.

    Published: a KL threshold of 1e-5 nats a dimension. On handwriting 1e-4.
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
    """DDPO (arXiv 2305.13301): the clipped policy gradient over DDIM steps of epsilon; with kl.coef DPOK (2305.16381).

    Published (SD 1.5): 50 steps at eta 1, guidance 5, clip range 1e-4, advantages by prompt clipped at 5, LoRA at 3e-4. On
    handwriting-unet 10 steps, of which the noisier ones are stochastic, and a rate of 2e-3: at 5e-4 50 updates end at
    0.93, at 2e-3 above 0.99.
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
    """DiffusionNFT (arXiv 2509.16117): on re-noised samples of an ODE, towards the good and away from the bad.

    Published (SD3.5-M): 10 steps of DPM-Solver++ 2M without guidance, 48 prompts of 24 samples, all levels of the schedule,
    beta 1 and an old policy of decay min(0.001 n, 0.5), or for OCR beta 0.1 and min(0.0075 (n - 75), 0.999); advantages
    clipped at 5; velocity KL 1e-4; LoRA at 3e-4. On handwriting 4 levels a sample.
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
    """AWM (arXiv 2509.25050): the policy gradient whose log-probability is the matching error of re-noised samples.

    Published: the weighting ghuber, samples of any sampler, the clipped surrogate. On handwriting the ODE, 4 levels a
    sample.
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
    """Diffusion-DPO (arXiv 2311.12908), online: the best against the worst of each group; or offline, from a file.

    Published: beta 2000 (SD 1.5) to 5000 (SDXL), in pairs from people. `fluvial preferences` writes a folder of pairs from a
    model's samples and a reward; --objective.preferences trains on one. On handwriting online, groups of 8.
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

    On handwriting with a velocity KL of 1: samples of few steps are paler than what the model was trained on, and without
    the KL a model that learns from its own fades, round by round, to blank images (from 0.51 of the codes right to none in
    50 updates).
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
    """Supervised fine-tuning: flow matching (arXiv 2210.02747) on the job's own data, as pre-training did."""
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
    """On-policy distillation (arXiv 2306.13649): the student walks, a teacher says which step it would have taken.

    The teacher is a folder of weights, --objective.teacher; by default what `fluvial train grpo` leaves. Rewards are
    watched, not learnt from.
    """
    return _recipe(
        model,
        Distill(teacher=teacher),
        RolloutConfig(prompts=128, group=1, eta=0.7),
        tuned={**ONE_UPDATE, "rollout": RolloutConfig(prompts=128, group=1, window=5, window_high=6)},
    )


def handwriting(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) as `make train` runs it: 80 rollouts of 128 samples, one update of each."""
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
    """Return a run with the published numbers, or for the built-in models with those that were found on them.

    Args:
        model: what is trained.
        objective, rollout, published: as published, where not said otherwise with LoRA of rank 32.
        tuned: what is else on handwriting.
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
