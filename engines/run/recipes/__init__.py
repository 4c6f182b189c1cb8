"""Recipes: functions that return a run, from which the command line makes its flags.

Each has settings for large models and others for the built-in ones, which train in minutes on a CPU.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods import (
    AlignProp,
    Awm,
    Crd,
    D3po,
    Dgpo,
    Distill,
    Doubt,
    Dpo,
    Dppo,
    Gardo,
    Grpo,
    Guard,
    KLConfig,
    Kto,
    Mapo,
    Nft,
    Raft,
    Sft,
    StepKLConfig,
    TempFlow,
)
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig, explain_fixed_micro_batch, with_values
from fluvial.engines.run.recipes.base import (
    BATCH,
    EDIT_WORDS,
    HANDWRITING,
    NOISIEST,
    ODE,
    ONE_UPDATE,
    TWO,
    UNET,
    WORDS,
    of_model,
    of_published,
)
from fluvial.engines.run.recipes.few_steps import ac_dmd, dmd2, refl, rtdmd, srpo, tdm, tdm_r1
from fluvial.engines.run.recipes.steps import adjoint, branchgrpo, chunk, densegrpo, lpo, spo, tpgrpo
from fluvial.engines.sampling.config import ReadingConfig, SamplingConfig, ScoutedGroups
from fluvial.engines.sampling.noising import AutoLevels, NoisingConfig
from fluvial.engines.sampling.samplers import Ode, Stochastic
from fluvial.engines.sampling.window import AllSteps, FirstRecorded, RandomRecorded, RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import LoraConfig
from fluvial.models.lora import LowRank


def grpo(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the stochastic steps of a flow, in groups.

    The settings of large models are those of the published run flow_grpo/sd3.5-medium/ocr (`fluvial runs` prints them): 10
    stochastic steps at eta 0.7, of which the first 9 are trained on. On handwriting a random window of 5 stochastic steps
    lies within the six noisiest, which decide what is written (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802), with 16 prompts
    of 8 samples, no KL, and a learning rate that falls to 0. Full fine-tuning needs another learning rate and a KL there:
    train full, optimizer.lr 2e-4, kl.coef 0.1.
    """
    return of_published("flow_grpo/sd3.5-medium/ocr", model, method=Grpo(sampling=NOISIEST, advantage=BATCH, passes=TWO))


def flash(model: str = HANDWRITING) -> TrainConfig:
    """Flash-GRPO (arXiv 2605.15980): GRPO on one step, the same of all samples of a prompt, weighted by its noise.

    The settings of large models are those of the published run flash_grpo/wan2.1-t2v-1.3b/hpsv3: one of the first 10 of 20
    steps, guidance 4.5, 96 samples. Its group of 4 is called effectively 2 in their code; LoRA of rank 32 is assumed. On
    handwriting it is one of the six noisiest steps.
    """
    one = replace(NOISIEST, window=RandomWindow(1, high=6, draw="group"))
    advantage = AdvantageConfig(scale="batch", clip=5.0)
    method = Grpo(sampling=one, advantage=advantage, passes=TWO, weighting="std_over_b")
    return of_published("flash_grpo/wan2.1-t2v-1.3b/hpsv3", model, method=method)


def dance(model: str = HANDWRITING) -> TrainConfig:
    """DanceGRPO (arXiv 2505.07818): GRPO on a reverse SDE with a constant noise rate, trained on a part of the steps.

    The settings of large models are those of the published run dancegrpo/flux.1-dev/hpsv2-16gpu: 16 steps at eta 0.3, of
    which the last takes no noise and 60 % of the others are trained on, groups of 12 samples that start from the same
    noise, full fine-tuning. On handwriting it trains LoRA, with eta 0.8, on the noisier steps alone.
    """
    return of_published(
        "dancegrpo/flux.1-dev/hpsv2-16gpu",
        model,
        method=Grpo(
            sampling=SamplingConfig(
                prompts=16, group=8, shared_noise=True, sampler=Stochastic("dance_sde"), window=AllSteps(high=7)
            ),
            trained=RandomRecorded(5 / 7),
            advantage=AdvantageConfig(clip=5.0),
            passes=TWO,
        ),
    )


def cps(model: str = HANDWRITING) -> TrainConfig:
    """Flow-CPS (arXiv 2509.05952): GRPO with steps that preserve the path's coefficients, so that no surplus noise is left.

    The settings of large models are those of the published run flow_grpo/sd3.5-medium/geneval-fast-nocfg: a window of 3
    steps in the first half, and the negative squared error as log-probability (form unscaled). The authors' own
    runs (flow_cps/...) take all steps. On handwriting the log-probability is the true density.
    """
    return of_published(
        "flow_grpo/sd3.5-medium/geneval-fast-nocfg",
        model,
        method=Grpo(sampling=replace(NOISIEST, sampler=Stochastic("cps")), advantage=BATCH, passes=TWO),
    )


def guard(model: str = HANDWRITING) -> TrainConfig:
    """GRPO-Guard (arXiv 2510.22319): a ratio that is centred and scaled so that every step's gradient has the same size.

    The settings of large models are those of the published run grpo_guard/sd3.5-medium/ocr. On handwriting the clip range
    is 1e-3.
    """
    return of_published(
        "grpo_guard/sd3.5-medium/ocr", model, method=Guard(clip=1e-3, sampling=NOISIEST, advantage=BATCH, passes=TWO)
    )


def pref_grpo(model: str = HANDWRITING) -> TrainConfig:
    """Pref-GRPO (arXiv 2508.20751): the reward is how often a sample wins against the others of its group (`win_rate`).

    Numbers of large models are those of the authors' run on FLUX.1-dev: GRPO-Guard's ratio, 25 steps from one noise per
    group of 8, the first 60 % trained on, and rewards normalised one by one, `--rewards win_rate:url=URL=0.4 clipscore=0.6`;
    prompts per rollout and LoRA are assumed. On handwriting samples are compared by the characters that are read.
    """
    sampling = SamplingConfig(64, 8, 25, shared_noise=True, sampler=Stochastic(eta=0.7))
    advantage = AdvantageConfig(combine="gdpo")
    return of_model(
        model,
        Guard(clip=1e-4, sampling=sampling, trained=FirstRecorded(0.6), advantage=advantage),
        tuned={
            "method": Guard(clip=1e-3, sampling=NOISIEST, advantage=BATCH, passes=TWO),
            "optimizer.lr": 5e-4,
            "rewards": ("pairwise:judge=characters",),
        },
        **{"optimizer.lr": 1e-5},
    )


def dppo(model: str = HANDWRITING) -> TrainConfig:
    """Flow-DPPO (arXiv 2606.11025): the exact KL of a step, in place of a clipped ratio, decides which pairs are held back.

    The settings of large models are those of the published run unirl/sd3.5-medium/flowdppo. On handwriting the KL threshold
    is 1e-4 nats per dimension.
    """
    return of_published(
        "unirl/sd3.5-medium/flowdppo", model, method=Dppo(kl_threshold=1e-4, sampling=NOISIEST, advantage=BATCH, passes=TWO)
    )


def ddpo(model: str = UNET) -> TrainConfig:
    """DDPO (arXiv 2305.13301): clipped policy gradient on DDIM steps of epsilon models; DPOK with a KL (2305.16381).

    The settings of large models are those of the published run ddpo/sd1.4/aesthetic, with a group of 16 samples per prompt
    in place of its statistics per prompt over past rollouts. On handwriting-unet it takes 10 steps, of which a random window
    of 3 among the first 8 is stochastic, and 24 updates at a learning rate of 3e-3. `make train` runs that, and looks
    at 500 samples before and after, so that the first minute is short.
    """
    config = of_published(
        "ddpo/sd1.4/aesthetic",
        model,
        **{
            **ONE_UPDATE,
            "updates": 24,
            "engine.micro_batch": 64,
            "evaluation.micro_batch": 128,  # a tenth faster per sample than passes of 64
            "evaluation.final_samples": 500,
            "lora.form": LowRank(product="merged"),
        },
        method=Grpo(
            sampling=SamplingConfig(16, 8, sampler=Stochastic("ddim", eta=1.0), window=RandomWindow(3, high=8)),
            advantage=BATCH,
        ),
        optimizer=OptimizerConfig(lr=3e-3, schedule="cosine", ema_decay=0.9),
    )
    return config if model in MODELS else with_values(config, {"sampling.prompts": 16, "sampling.group": 16})


def nft(model: str = HANDWRITING) -> TrainConfig:
    """DiffusionNFT (arXiv 2509.16117): on noised samples of an ODE, towards good ones and away from bad ones.

    The settings of large models are those of the published run diffusion_nft/sd3.5-medium/geneval: DPM-Solver++ 2M without
    guidance, 9 random levels of the 10 per sample, and an old policy with decay min(0.001 n, 0.5) after n updates. On
    handwriting it trains on 4 levels per sample.
    """
    return of_published(
        "diffusion_nft/sd3.5-medium/geneval",
        model,
        **ONE_UPDATE,
        method=Nft(beta=1.0, sampling=replace(ODE, sampler=Ode("dpmpp_2m")), advantage=BATCH, noising=NoisingConfig(each=4)),
    )


def sol_rl(model: str = HANDWRITING) -> TrainConfig:
    """Sol-RL (arXiv 2604.06916): DiffusionNFT on the best and the worst of many initial noises, which quick scouts chose.

    Numbers of large models are those of the authors' code for Sana: 96 scouts per prompt of 6 steps, 24 samples of 10 steps,
    6 levels per sample. Their scouts compute in 4 bits, and these as the rollout does; learning rate and solver are assumed.
    On handwriting 24 scouts of 4 steps choose 8 samples.
    """
    method = Nft(
        beta=1.0,
        sampling=SamplingConfig(48, 24, sampler=Ode("dpmpp_2m"), groups=ScoutedGroups()),
        advantage=BATCH,
        noising=NoisingConfig(each=6),
        kl=KLConfig(coef=1e-4),
    )
    sampling = replace(method.sampling, prompts=16, group=8, groups=ScoutedGroups(24, 4))
    return of_model(
        model, method, tuned={**ONE_UPDATE, "method": replace(method, sampling=sampling, noising=NoisingConfig(each=4))}
    )


def awm(model: str = HANDWRITING) -> TrainConfig:
    """AWM (arXiv 2509.25050): a policy gradient whose log-probability is the matching error of samples with noise on them.

    The settings of large models are those of the published run awm/sd3.5-medium/geneval, with its second KL term to a moving
    average of the policy, and SA-Solver. On handwriting it samples with Euler's steps and trains on 4 levels per sample,
    without a KL.
    """
    return of_published(
        "awm/sd3.5-medium/geneval",
        model,
        **ONE_UPDATE,
        method=Awm(weighting="t", sampling=ODE, advantage=BATCH, noising=NoisingConfig(each=4)),
    )


def dpo(model: str = HANDWRITING) -> TrainConfig:
    """Diffusion-DPO (arXiv 2311.12908): fit the preferred of two samples more; online from a rollout, or from a folder.

    Online, the pairs are the best and the worst sample of each group. Offline, they come from a folder that `fluvial
    preferences` wrote (preferences), as in the published runs, which train on pairs that people chose, with
    beta 2000 (paper, SD 1.5) or 5000 (code). On handwriting it is online, with groups of 8 and beta 100.
    """
    return of_model(
        model,
        Dpo(beta=2000.0, sampling=SamplingConfig(prompts=64, group=8, sampler=Ode()), noising=NoisingConfig(each=4)),
        tuned={**ONE_UPDATE, "method": Dpo(beta=100.0, sampling=ODE, noising=NoisingConfig(each=8))},
    )


def mapo(model: str = HANDWRITING) -> TrainConfig:
    """MaPO (arXiv 2406.06424): fit the preferred of two samples and make it likelier than the other, without a reference.

    Numbers of large models are those of its code's run on SDXL: 16 pairs per update, 2,000 updates, LoRA of rank 8 (its
    alpha is assumed), learning rate 1e-5; name a folder of pairs (preferences). On handwriting, with pairs of the rollout,
    the temperature is 20: two images differ by more than their order does, so that at 1,000 every preference is settled,
    and nothing is learnt from it.
    """
    return of_model(
        model,
        Mapo(sampling=SamplingConfig(prompts=16, sampler=Ode()), noising=NoisingConfig(each=1, levels=AutoLevels())),
        tuned={
            **ONE_UPDATE,
            "method": Mapo(
                beta=10.0, temperature=20.0, sampling=replace(ODE, sampler=Ode("dpmpp_2m")), noising=NoisingConfig(each=8)
            ),
            "optimizer.lr": 5e-4,
            "optimizer.ema_decay": 0.9,
            "lora": LoraConfig(),
        },
        **{"optimizer.lr": 1e-5, "optimizer.ema_decay": 0.0, "lora": LoraConfig(rank=8, alpha=8.0), "updates": 2000},
    )


def kto(model: str = HANDWRITING) -> TrainConfig:
    """Diffusion-KTO (arXiv 2404.04465): fit images that are labelled good, and fit bad ones less, without pairs.

    Numbers of large models are those of its code's run on SD 1.5, which trains all weights with 8 images per GPU (8 GPUs are
    assumed here) for 20,000 updates, and has AdamW in 8 bits (optimizer.name adamw8bit); name images with labels
    (data.images). It drops a fifth of the captions, which is not offered. On handwriting images of a rollout are good if
    their reward is above the mean of their group.
    """
    return of_model(
        model,
        Kto(sampling=SamplingConfig(prompts=64, group=1, sampler=Ode()), noising=NoisingConfig(each=1, levels=AutoLevels())),
        tuned={
            **ONE_UPDATE,
            "train": "lora",
            "method": Kto(labels="reward", beta=100.0, sampling=ODE, noising=NoisingConfig(each=8)),
            "optimizer": OptimizerConfig(lr=5e-4, schedule="cosine", ema_decay=0.9),
        },
        **{"train": "full", "optimizer": OptimizerConfig(lr=1e-7, warmup=200), "updates": 20000},
    )


def dgpo(model: str = HANDWRITING) -> TrainConfig:
    """DGPO (arXiv 2510.08425): a preference between the good and the bad samples of a group, on samples with noise on them.

    The settings of large models are those of the published run dgpo/sd3.5-medium/geneval: DPM-Solver++ 2M with guidance 4.5,
    4 of the 5 noisiest levels, the same for all samples, and one noise per group; the update is without guidance. On
    handwriting it trains on 4 of all levels.
    """
    return of_published(
        "dgpo/sd3.5-medium/geneval",
        model,
        **ONE_UPDATE,
        method=Dgpo(
            sampling=replace(ODE, sampler=Ode("dpmpp_2m")),
            noising=NoisingConfig(each=4, draw="rollout"),
            kl=KLConfig(coef=0.02),
        ),
    )


def crd(model: str = HANDWRITING) -> TrainConfig:
    """CRD (arXiv 2603.14128): the model's implicit rewards are fitted to the given ones, both centred over the update.

    The settings of large models are those of the published run flow_factory/sd3.5-medium/crd-ocr, without the guidance of
    its reference, and with as many levels per sample as its schedule has steps. On handwriting it trains on 4 levels per
    sample.
    """
    return of_published(
        "flow_factory/sd3.5-medium/crd-ocr",
        model,
        **ONE_UPDATE,
        method=Crd(sampling=ODE, advantage=BATCH, noising=NoisingConfig(each=4), kl=KLConfig(coef=0.1)),
    )


def tempflow(model: str = HANDWRITING) -> TrainConfig:
    """TempFlow-GRPO (arXiv 2508.04324): branches that differ in one step's noise, and steps weighted by their noise.

    The settings of large models are those of the published run tempflow_grpo/flux.1-dev/hpsv3: 6 branches of each initial
    noise at each of 9 steps, 4 initial noises per prompt, and a KL whose weight is exact. On handwriting 8 branches of one
    initial noise, at one of the six noisiest steps.
    """
    return of_published(
        "tempflow_grpo/flux.1-dev/hpsv3",
        model,
        method=TempFlow(
            sampling=SamplingConfig(prompts=16, group=8, shared_noise=True, window=RandomWindow(1, high=6)), passes=TWO
        ),
    )


def gardo(model: str = HANDWRITING) -> TrainConfig:
    """GARDO (arXiv 2512.24138): diverse good samples count for more, and a KL holds those whose reward is doubted.

    The first reward is learnt from; others, of which there is at least one, say where it is doubted. The settings of large
    models are those of the published run gardo/sd3.5-medium/ocr, with the gate's sign of its code (gate.doubted underrated);
    its features are DINOv3's, and here thumbnails (features). On handwriting overrated samples are doubted, by a density of
    real digits.
    """
    return of_published(
        "gardo/sd3.5-medium/ocr",
        model,
        method=Gardo(
            sampling=NOISIEST, passes=TWO, kl=StepKLConfig(0.04, weight="exact"), gate=Doubt(), clip_low=1e-3, clip_high=1e-3
        ),
        rewards=("characters", "likeness"),
    )


def d3po(model: str = UNET) -> TrainConfig:
    """D3PO (arXiv 2311.13231): a preference between the best and the worst of a group, as one between each pair of steps.

    The settings of large models are those of the published run d3po/sd1.5/compressibility: two samples per prompt from the
    same noise, on 20 DDIM steps. On handwriting-unet groups of 8, and beta 100, because the log-ratios are per dimension.
    """
    config = of_published(
        "d3po/sd1.5/compressibility",
        model,
        **ONE_UPDATE,
        method=D3po(
            beta=100.0, sampling=SamplingConfig(16, 8, sampler=Stochastic("ddim", eta=1.0), window=RandomWindow(6, high=8))
        ),
        optimizer=OptimizerConfig(lr=2e-3, schedule="cosine", ema_decay=0.9),
    )
    return config if model in MODELS else with_values(config, {"sampling.prompts": 20})


def alignprop(model: str = HANDWRITING) -> TrainConfig:
    """AlignProp (arXiv 2310.03739) and DRaFT (2309.17400): a differentiable reward's gradient through the last steps.

    The settings of large models are those of the published run alignprop/sd1.5/aesthetic: 50 DDIM steps, of which the
    gradient flows through the last 8 or so. On handwriting it flows through 2, from likeness, a density of real digits.
    """
    return of_published(
        "alignprop/sd1.5/aesthetic",
        model,
        **ONE_UPDATE,
        method=AlignProp(last=2, sampling=SamplingConfig(prompts=128, group=1, sampler=Ode())),
        rewards=("likeness",),
    )


def raft(model: str = HANDWRITING) -> TrainConfig:
    """RAFT (arXiv 2304.06767): flow matching on the best samples of each group.

    On handwriting with a velocity KL of 1: samples of few steps are paler than the data of pre-training. Without the KL,
    a model that learns from its own samples fades to blank images (from 0.51 of the codes right to none in 50 updates).
    """
    return of_model(
        model,
        Raft(sampling=SamplingConfig(prompts=48, group=24, sampler=Ode())),
        tuned={**ONE_UPDATE, "method": Raft(sampling=replace(ODE, sampler=Ode("dpmpp_2m")), kl=KLConfig(coef=1.0))},
    )


def sft(model: str = HANDWRITING) -> TrainConfig:
    """Supervised fine-tuning: flow matching (arXiv 2210.02747) on the job's own data, as in pre-training."""
    return of_model(
        model,
        Sft(sampling=ReadingConfig(prompts=128), noising=NoisingConfig(each=1, levels=AutoLevels())),
        tuned={
            **ONE_UPDATE,
            "method": Sft(sampling=ReadingConfig(prompts=128), noising=NoisingConfig(each=4, levels=AutoLevels())),
            "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", ema_decay=0.9),
        },
    )


def distill(model: str = HANDWRITING, *, teacher: str = "runs/grpo/weights") -> TrainConfig:
    """On-policy distillation (arXiv 2306.13649): the student samples, a teacher says which step it would have taken.

    The teacher is a folder of weights (teacher), by default what `fluvial train grpo` exports. Rewards are
    measured, not learnt from.
    """
    return of_model(
        model,
        Distill(teacher=(teacher,), sampling=SamplingConfig(prompts=128, group=1, sampler=Stochastic(eta=0.7))),
        tuned={**ONE_UPDATE, "method": Distill(teacher=(teacher,), sampling=replace(NOISIEST, prompts=128, group=1))},
    )


def opd(model: str = HANDWRITING) -> TrainConfig:
    """DiffusionOPD (arXiv 2605.15055): teachers of several tasks, each for prompts of its own, become one student.

    The settings of large models are those of the published run diffusion_opd/sd3.5-medium/three-teachers, whose teachers
    have guidance of their own. Name yours by the files of prompts, e.g. prompts ocr.txt geneval.jsonl with teacher
    ocr=FOLDER geneval=FOLDER; folders hold weights or adapters. On handwriting two runs of grpo teach codes with a low and
    with a high first digit: make them with prompts @codes-low and out runs/low, and with @codes-high and runs/high. Rewards
    are measured, not learnt from.
    """
    codes = {"@codes-low": "low", "@codes-high": "high"}
    return of_published(
        "diffusion_opd/sd3.5-medium/three-teachers",
        model,
        **ONE_UPDATE,
        method=Distill(
            teacher=tuple(f"{source}=runs/{run}/weights" for source, run in codes.items()),
            sampling=replace(ODE, prompts=128, group=1),
            match="velocity_mse",
        ),
        prompts=tuple(codes),
    )


def handwriting(model: str = HANDWRITING) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) on the small SD3 transformer: 80 rollouts of 128 samples, one update each."""
    return with_values(grpo(model), {"updates": 80, "evaluation.every": 20, "passes.minibatches": 1})


def words(model: str = WORDS) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) on a small SD3 transformer that draws words, with RapidOCR as the reward.

    The reward is legibility: the share of right letters, plus how sure RapidOCR is of a word that it reads right. With
    --rewards letters it is the share of right letters alone, as in the text-rendering papers.
    """
    config = handwriting(model)
    if model != WORDS:
        return config
    tuned = {"rewards": ("legibility",), "optimizer.lr": 2e-3, "lora.form": LowRank(product="merged")}
    return with_values(config, {**tuned, "evaluation.seeds": 1, "evaluation.samples": 100})


def edit_words(model: str = EDIT_WORDS) -> TrainConfig:
    """Flow-GRPO (arXiv 2505.05470) on the network of words given an image with a wrong letter, which it is to correct.

    The reward is that of words, plus the share of the other letters' ink that stays where it was (`unchanged`).
    """
    if model != EDIT_WORDS:
        return words(model)
    return replace(words(), model=model, updates=40, rewards=("legibility", "unchanged"))


RECIPES: dict[str, Callable[..., TrainConfig]] = {
    recipe.__name__.replace("_", "-"): recipe
    for recipe in (
        *(grpo, flash, dance, cps, guard, pref_grpo, dppo, ddpo, tempflow, chunk, densegrpo, tpgrpo, branchgrpo, gardo),
        *(d3po, spo, lpo),
        *(nft, sol_rl, awm, dgpo, crd, raft, sft, dpo, mapo, kto),
        *(alignprop, adjoint, refl, srpo, distill, opd, dmd2, ac_dmd, rtdmd, tdm, tdm_r1),
        *(handwriting, words, edit_words),
    )
}


# Groups per GPU and rollout, as in flow_grpo's own runs of 4 GPUs (sd3.5-medium/ocr-4gpu: 16 groups) and of one
# (wan2.1-t2v-1.3b/ocr: 4).
GROUPS = 4


def on_gpus(config: TrainConfig, preset: str) -> tuple[TrainConfig, str]:
    """Return a run with at most `GROUPS` groups per GPU, whose micro-batch is found by trial, and what changes, in words.

    Args:
        config: run as a recipe or a published run describes it.
        preset: number of GPUs, as in 1gpu or 8gpu.

    Raises:
        UsageError: the preset is no such number, or the run has no published rollout.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})gpus?", preset)
    if match is None:
        raise UsageError("preset", preset, "a number of GPUs, such as 1gpu or 8gpu")
    if config.model in MODELS:
        raise no_effect("preset", f"with {config.model}, whose settings were found on a CPU")
    if not config.makes_samples:
        raise no_effect("preset", "with a method that makes no samples")
    published = config.method.sampling
    updates = getattr(config.method, "fake_updates", config.method.passes.minibatches)
    groups = min(published.prompts, -(-max(GROUPS * int(match[1]), updates) // updates) * updates)
    is_fixed = explain_fixed_micro_batch(config.method) is not None
    changes = [f"sampling.prompts {groups} in place of {published.prompts}"] if groups != published.prompts else []
    changes += (
        [] if (size := config.engine.micro_batch) == "auto" or is_fixed else [f"engine.micro_batch auto in place of {size}"]
    )
    said = f"--preset {preset}: {', '.join(changes) or 'nothing changes'}; a rollout has {groups * published.group} samples"
    if groups != published.prompts:
        said += f", published {published.batch}; every other setting stays"
    size = size if is_fixed else "auto"
    return with_values(config, {"sampling.prompts": groups, "engine.micro_batch": size}), said
