"""The runs that `digests.py` trains: name -> configuration, job, and the way that the run is made."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from helpers import tiny_pipelines, tiny_replayed, tiny_token_job
from PIL import Image
from torch import Tensor

from fluvial.core.random import key
from fluvial.engines import Job, OptimizerConfig, TrainConfig
from fluvial.engines.data.preferences import write_preferences
from fluvial.engines.data.records import Prompt
from fluvial.engines.methods import Doubt, HeadGan, NoiseMargin
from fluvial.engines.methods import table as o
from fluvial.engines.run.config import with_values
from fluvial.engines.run.declared import LinearOld, NoOld, Ramp
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.method import Method
from fluvial.engines.sampling.config import (
    Mask,
    ReadingConfig,
    RefilledGroups,
    Reject,
    SamplingConfig,
    ScoutedGroups,
    ServersConfig,
    Truncate,
)
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.noising import AutoLevels, ContinuousLevels, LogitNormalLevels, NoisingConfig, StratifiedLevels
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import (
    AllRecorded,
    AllSteps,
    Branches,
    Candidates,
    FirstRecorded,
    MovingWindow,
    RandomRecorded,
    RandomWindow,
    ScatteredSteps,
    Splits,
    StratifiedRecorded,
)
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import LoraConfig
from fluvial.models.handwriting import BASE, BASE_UNET, Handwriting, HandwritingUNet, draw_codes
from fluvial.models.lora import Dora, Lokr, LowRank
from fluvial.models.pipelines.folder import silence
from fluvial.models.step_cache import FirstBlockCache

CODES = ("0427", "1999", "3141", "8650", "7777", "1234")
FOXES = tuple(f"{number} red foxes" for number in range(6))
# A run alone; once more from a checkpoint in its middle; by a server; from rollouts that it stored; or the whole command's
# loop. All but the first and last also train the run alone, and raise unless both end in the same weights and moments.
Way = Literal["alone", "resumed", "served", "replayed", "loop"]


class Case(NamedTuple):
    config: TrainConfig
    job: Callable[[], Job | None] = lambda: job()  # None: the job that the configuration describes
    way: Way = "alone"
    ranks: tuple[int, ...] = (1, 2)  # numbers of ranks that it is for


def flat_in_one_group(scores: Tensor, prompts: Sequence[Any], value: float) -> Tensor:
    fixed = torch.tensor([str(prompt) == CODES[1] for prompt in prompts], device=scores.device)
    return torch.where(fixed, value, scores)


def bold(images: Tensor, prompts: Sequence[Any]) -> Tensor:
    return flat_in_one_group(images.flatten(1).mean(1), prompts, 0.5)


def neat(images: Tensor, prompts: Sequence[Any]) -> Tensor:
    scores = images.flatten(1).square().mean(1)
    return scores if scores.requires_grad else flat_in_one_group(scores, prompts, 0.25)


def job(*, unet: bool = False, **changes: Any) -> Job:
    load: Callable[[Path], Any] = HandwritingUNet if unet else Handwriting
    made = Job(
        load(BASE_UNET if unet else BASE),
        CODES,
        {"bold": bold, "neat": neat},
        heldout=["0001", "0002"],
        load=load,
        data=lambda key, prompts: draw_codes(key, [prompt.text for prompt in prompts]),
        encode=lambda images: 2 * images - 1,
    )
    return replace(made, **changes)


def captioned_job() -> Job:
    return job(prompts=tuple(Prompt(code, image=Path(f"{code}-{n}")) for code in CODES for n in range(3)))


def job_of_sources() -> Job:
    return job(prompts=tuple(Prompt(code, source="odd" if int(code) % 2 else "even") for code in CODES))


def prepare(folder: Path, models: Collection[str]) -> None:
    """Write what the cases read: preferences, images with captions, prompts, and the tiny pipelines of these names."""
    model = Handwriting(BASE)
    better, worse = (model.decode(draw_codes(key(seed), list(CODES))) for seed in (1, 2))
    write_preferences(folder / "pairs", [(c, a, b.flip(-1)) for c, a, b in zip(CODES, better, worse, strict=True)])
    (folder / "foxes").mkdir()
    noise = torch.Generator().manual_seed(0)
    for number, caption in enumerate(FOXES):
        pixels = torch.randint(256, (20, 20 if number % 2 else 30, 3), generator=noise, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / "foxes" / f"{number}.png")
        (folder / "foxes" / f"{number}.txt").write_text(caption, encoding="utf-8")
    (folder / "prompts.txt").write_text("\n".join(FOXES), encoding="utf-8")
    (folder / "heldout.txt").write_text("a cow", encoding="utf-8")
    for name in models:
        if name in tiny_pipelines.ROWS:
            tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name)
        elif name in tiny_replayed.ROWS:
            with silence():
                tiny_replayed.load(name, folder / name)


SDE = SamplingConfig(prompts=3, group=4, steps=4, window=RandomWindow(2, high=3), sampler=Stochastic(eta=0.7))
ODE = SamplingConfig(prompts=3, group=4, steps=4, sampler=Ode())
EVERY = SamplingConfig(prompts=12, group=1, steps=4, sampler=Stochastic(eta=2**0.5))
SINGLE = replace(ODE, prompts=12, group=1)  # for methods without groups
READ = ReadingConfig(prompts=12, steps=4)
NOISED = NoisingConfig(each=3)
FULL: dict[str, Any] = {"train": "full", "optimizer": OptimizerConfig(lr=1e-4, ema_decay=0.9)}
KL = {"kl.coef": 0.1}
GAN = HeadGan(weight=0.5, critic_weight=0.1)
LAGGING = o.Nft(beta=1.0, old=LinearOld(rise=0.1))
TRUNCATED = Truncate()


def run(method: Method, sampling: ReadingConfig, /, **changes: Any) -> TrainConfig:
    rollouts = changes.pop("rollouts", 2)
    values: dict[str, Any] = {
        "method": method,
        "sampling": sampling,
        "seed": 3,
        "updates": rollouts * changes.get("passes.epochs", 1) * changes.get("passes.minibatches", 1),
        "engine.micro_batch": 4,
        "engine.update_micro_batch": "rollout",
        "train": "lora",
        "optimizer": OptimizerConfig(lr=1e-3, ema_decay=0.9),
        "rewards": ("bold", "neat=0.5"),
    }
    return with_values(TrainConfig(Path("out"), o.Grpo()), {**values, **changes})


def grpo(sampling: SamplingConfig = SDE, /, **changes: Any) -> TrainConfig:
    return run(o.Grpo(), sampling, **{"passes.minibatches": 2, **changes})


def nft(sampling: SamplingConfig = ODE, /, **changes: Any) -> TrainConfig:
    """Return a run of DiffusionNFT whose old policy lags behind."""
    return run(LAGGING, sampling, **{"noising": NOISED, "passes.minibatches": 2, **changes})


def pipeline(folder: Path, name: str, base: TrainConfig, *, kind: str = "", **asked: Any) -> Case:
    size = {} if "sizes" in asked else {"height": 16, "width": 16}
    cache, held = folder / "texts" / (kind or name), (str(folder / "heldout.txt"),)
    settings = PipelineConfig(**{**size, "text_cache": cache, "heldout": held, **asked})
    rewards = ("helpers.digest_cases:bold",) if base.rewards else ()
    prompts = () if base.data.images else (str(folder / "prompts.txt"),)
    changes: dict[str, Any] = {
        "sampling.steps": 3,
        "sampling.prompts": 2,
        "sampling.group": 2,
        "engine.micro_batch": 2,
        "rewards": rewards,
        "prompts": prompts,
    }
    return Case(with_values(base, {"model": str(folder / name), "pipeline": settings, **changes}), lambda: None)


def clipped_cases() -> dict[str, TrainConfig]:
    """Return runs of methods with ratios of recorded steps: what they sample, weight and correct."""
    wide = Mask("trajectory", threshold=1.0005)
    half = {"rollout.autocast": True}
    return {
        "grpo": grpo(),
        "grpo-weighting": grpo(replace(SDE, window=RandomWindow(1, high=3, draw="group")), weighting="std_over_b"),
        "grpo-epochs": run(
            o.Grpo(clip_low=1e-4, clip_high=1e-4),
            SDE,
            advantage=AdvantageConfig(drop_zero=True, clip=1.5),
            **{"passes.minibatches": 2, "passes.epochs": 2},
        ),
        "grpo-kl-full": grpo(**KL, **FULL),
        "grpo-kl-ema": grpo(**{"kl.coef": 0.1, "kl.ema_coef": 0.5, "kl.ema_rise": 0.1}),
        "grpo-kl-mse": grpo(**{"kl.coef": 0.1, "kl.weight": "mse"}),
        "grpo-guided": grpo(replace(SDE, guidance=Guidance(3.0)), **{"kl.coef": 0.1, "kl.guidance": 1.5}),
        "grpo-guided-half": grpo(replace(SDE, guidance=Guidance(3.0, gradient="conditional"))),
        "grpo-correct": grpo(correction=TRUNCATED),
        "grpo-reject": grpo(**half, correction=Reject(threshold=1.001), **{"rollout.max_log_ratio": 1e3}),
        "grpo-trained": grpo(replace(SDE, window=AllSteps(high=3), shared_noise=True), trained=RandomRecorded(0.7)),
        "grpo-first": grpo(replace(SDE, window=AllSteps(high=3)), trained=FirstRecorded(0.7)),
        "grpo-history": grpo(advantage=AdvantageConfig(history=20, history_min=3)),
        "grpo-history-3": grpo(rollouts=3, advantage=AdvantageConfig(history=20, history_min=6)),
        "grpo-gdpo": grpo(advantage=AdvantageConfig(combine="gdpo", scale="batch", ddof=0)),
        "grpo-floors": grpo(rewards=("bold", "neat"), advantage=AdvantageConfig(floors=("neat=0.3",), floor_lr=1.0)),
        "grpo-extremes": grpo(advantage=AdvantageConfig(extremes=1)),
        "grpo-autocast": grpo(**half, correction=Truncate(threshold=1.001), **{"rollout.max_log_ratio": 1e3}),
        "grpo-uneven": grpo(
            replace(SDE, prompts=4), advantage=AdvantageConfig(extremes=1), **{"engine.micro_batch": 2, "passes.epochs": 2}
        ),
        "grpo-pairs": grpo(**{"engine.update_micro_batch": 6}),
        "grpo-orders": grpo(seed=4, **{"data.seed": 5, "data.order": "draws"}),
        "guard": run(o.Guard(), SDE, **{"passes.minibatches": 2}),
        "dppo": run(o.Dppo(), SDE, **KL, **{"passes.minibatches": 2}),
        "dppo-autocast": run(
            o.Dppo(), SDE, **half, correction=wide, **{"rollout.max_log_ratio": 1e3, "passes.minibatches": 2}
        ),
        "tempflow": run(o.TempFlow(), SDE, **{"passes.minibatches": 2}),
        "chunk": run(o.ChunkGrpo(chunk=2), SDE, **KL, **{"passes.minibatches": 2}),
        "densegrpo": run(o.DenseGrpo(), SDE, **KL, **{"passes.minibatches": 2}),
        "tpgrpo": run(o.TurningPointGrpo(), replace(SDE, sampler=Stochastic("cps", 0.7), window=AllSteps(high=3))),
        "branchgrpo": run(o.BranchGrpo(), replace(SDE, window=Splits((0, 2), high=3)), **{"passes.minibatches": 2}),
        "spo": run(o.Spo(beta=100.0, margin=NoiseMargin(0.01, 0.02)), replace(SDE, window=Candidates(4, low=1, high=3))),
        "gardo": run(o.Gardo(gate=Doubt(), reset_after=1), SDE, **{"passes.minibatches": 2}),
        "d3po": run(o.D3po(beta=100.0), SDE),
        "d3po-uneven": run(o.D3po(beta=100.0), replace(SDE, prompts=4), **{"engine.micro_batch": 2}),
        "distill": run(o.Distill(teacher=(str(BASE),)), replace(SDE, prompts=12, group=1), **FULL),
        "dmd2": run(o.Dmd2(fake_updates=2), SINGLE, **{"sampling.sampler": Stochastic("cps", 1.0)}),
        "dmd2-full": run(
            o.Dmd2(fake_updates=2, guidance=1.0), SINGLE, **{"sampling.sampler": Stochastic("cps", 1.0)}, **FULL
        ),
        "dmd2-gan": run(o.Dmd2(fake_updates=2, gan=GAN), SINGLE, **{"sampling.sampler": Stochastic("cps", 1.0)}, **FULL),
        "ac-dmd": run(o.AcDmd(fake_updates=2, guidance=1.0), SINGLE, **{"sampling.sampler": Stochastic("cps", 0.9)}),
        "tdm": run(o.Tdm(fake_updates=2, fake=OptimizerConfig(lr=1e-3)), SINGLE, rollouts=3),
        "tdm-reverse": run(o.Tdm(interval="reverse", form="square", trained=AllRecorded()), SINGLE, train="lora"),
        "tdm-r1": run(o.TdmR1(guidance=1.0), replace(SDE, sampler=Ode()), train="lora"),
        "rtdmd": run(o.Rtdmd(first=2), replace(SDE, window=AllSteps(), sampler=Stochastic("cps", 0.9))),
        "refl": run(o.Refl(), replace(SINGLE, window=AllSteps(low=1))),
        "srpo": run(o.Srpo(wanted=("",), unwanted=("",), away=(-1.0, -1.0), margin=9.0), SINGLE),
        "distill-mse": run(o.Distill(teacher=(str(BASE),), match="velocity_mse"), replace(SDE, prompts=12, group=1), **KL),
    }


def sampling_cases() -> dict[str, TrainConfig]:
    """Return runs of GRPO with other windows and samplers, and of NFT with other solvers and noise levels."""
    flash = RandomWindow(1, low=1, high=2, tail=Tail("dpmpp_2m", fraction=0.6))
    samples = {
        "window-prefix": replace(SDE, window=RandomWindow(1, low=1, high=3, share_prefix=True)),
        "window-sample": replace(SDE, window=RandomWindow(2, high=3, draw="sample")),
        "window-tail": replace(SDE, steps=6, window=flash),
        "window-scattered": replace(SDE, window=ScatteredSteps(2, high=3, draw="call")),
        "window-moving": replace(SDE, window=MovingWindow(1, high=3)),
        "groups-refilled": replace(SDE, groups=RefilledGroups()),
        "window-branches": replace(SDE, group=8, window=Branches(size=1, samples=4, high=2)),
        "sampler-cps": replace(SDE, sampler=Stochastic("cps", 0.7)),
        "sampler-dance": replace(SDE, sampler=Stochastic("dance_sde", 0.3)),
    }
    more: dict[str, Any] = {"window-sample": {"form": "no_const"}, "sampler-cps": {"reduction": "sum"}}
    levels: dict[str, Any] = {
        "stratified": StratifiedLevels(),
        "continuous": ContinuousLevels(),
        "logit-normal": LogitNormalLevels(mean=0.5),
        "auto": AutoLevels(),
    }
    return {
        **{name: grpo(sampling, **more.get(name, {})) for name, sampling in samples.items()},
        "step-cache": grpo(**{"rollout.step_cache": FirstBlockCache(), "engine.compile": False}),
        **{f"levels-{name}": nft(noising=replace(NOISED, levels=each)) for name, each in levels.items()},
        "solver-dpmpp": nft(replace(ODE, sampler=Ode("dpmpp_2m"))),
        "solver-unipc": nft(replace(ODE, sampler=Ode("unipc"))),
        "solver-sa": nft(replace(ODE, sampler=SaSolver(eta=0.5), shared_noise=True)),
    }


def noised_cases(folder: Path) -> dict[str, TrainConfig]:
    """Return runs of methods that train on clean samples with noise, on pairs, or through the reward."""
    coupled = replace(ODE, guidance=Guidance(3.0, update="conditional"))
    averaged = {"kl.coef": 0.1, "kl.ema_coef": 1.0, "kl.ema_rise": 0.1}
    return {
        "groups-scouted": nft(replace(ODE, groups=ScoutedGroups(9, 2))),
        "nft": nft(replace(ODE, sampler=Ode("dpmpp_2m"))),
        "nft-kl": nft(**KL, **{"passes.minibatches": 1}),
        "nft-delayed": run(o.Nft(old=LinearOld(rise=0.2, delay=1, unit="updates")), ODE, noising=NOISED, rollouts=3),
        "nft-noold": run(o.Nft(beta=1.0, old=NoOld()), ODE, noising=NOISED, **{"passes.minibatches": 2}),
        "nft-noold-1": run(o.Nft(beta=1.0, old=NoOld()), ODE, noising=NOISED),
        "awm": run(o.Awm(), ODE, noising=NOISED, **averaged, **{"passes.minibatches": 2, "passes.epochs": 2}),
        "awm-call": run(o.Awm(), ODE, noising=replace(NOISED, draw="call")),
        "crd": run(o.Crd(rollout_policy=Ramp(rise=0.0075)), ODE, noising=NOISED, **KL, **{"passes.minibatches": 2}),
        "crd-uneven": run(
            o.Crd(rollout_policy=Ramp(rise=0.0075)),
            replace(ODE, prompts=2),
            noising=NOISED,
            **KL,
            **{"engine.micro_batch": 8, "passes.minibatches": 2},
        ),
        "dgpo": run(
            o.Dgpo(old_rise=0.1, old_samples_from=0), coupled, noising=replace(NOISED, draw="rollout"), **{"kl.coef": 0.02}
        ),
        "dpo-online": run(o.Dpo(beta=100.0), ODE, noising=NOISED),
        "dpo-online-2": run(o.Dpo(beta=100.0), ODE, noising=NOISED, **{"passes.minibatches": 2}),
        "mapo": run(o.Mapo(), ODE, noising=NOISED),
        "kto": run(o.Kto(labels="reward", beta=100.0), ODE, noising=NOISED, **{"passes.minibatches": 2}),
        "dpo-file": run(o.Dpo(beta=100.0, preferences=folder / "pairs"), ODE, noising=NOISED, rewards=(), rollouts=3),
        "raft": run(o.Raft(best=0.5), ODE, noising=NOISED, **{"kl.coef": 1.0, "passes.minibatches": 2}),
        "raft-data": run(o.Raft(best=0.5, compare="data"), ODE, noising=NOISED),
        "sft": run(o.Sft(), READ, noising=NOISED, rewards=()),
        "adjoint": run(o.AdjointMatching(scale=1.0), EVERY, rewards=("neat",), **{"passes.minibatches": 2}),
        "adjoint-current": run(
            o.AdjointMatching(scale=1.0, index="current", quantile=None, trained=StratifiedRecorded(first=1, rest=1)),
            replace(EVERY, guidance=Guidance(3.0, update="conditional")),
            rewards=("neat",),
            **FULL,
        ),
        "alignprop": run(o.AlignProp(last=2), SINGLE, rewards=("neat",)),
        "alignprop-spread": run(o.AlignProp(last=2, spread=1.0, target=0.3), SINGLE, rewards=("neat",)),
    }


def machine_cases() -> dict[str, TrainConfig]:
    """Return runs whose adapters, precision, optimizer and sharding are others."""
    engines: dict[str, Any] = {
        "offload-phases": {"offload": "phases"},
        "offload-always": {"offload": "always"},
        "comm-reshard": {"comm": "reshard", "replicas": 1},
        "sync-every": {"grad_sync": "every", "replicas": 1},
        "compute-bfloat16": {"compute": "bfloat16", "reduce": "bfloat16", "replicas": 1},
        "masters-bfloat16": {"masters": "bfloat16"},
        "kept-blocks": {"checkpointing": "block", "checkpointed": 2},
        "kept-selective": {"checkpointing": "selective"},
        "kept-host": {"checkpointing": "host"},
    }
    forms: dict[str, Any] = {
        "lora-factors": LowRank("gaussian", product="factors"),
        "lora-merged": LowRank(product="merged"),
        "dora": Dora(),
        "lokr": Lokr(),
    }
    optimizers: dict[str, Any] = {
        "optimizer-sgd": {"name": "sgd"},
        "optimizer-adafactor": {"name": "adafactor"},
        "optimizer-muon": {"name": "muon"},
        "optimizer-cosine": {"schedule": "cosine", "warmup": 2, "weight_decay": 0.1, "max_grad_norm": 1e-3},
        "optimizer-average": {"ema_decay": 0.9, "ema_interval": 2, "ema_repeats": 2, "ema_warmup": False},
    }
    return {
        **{
            name: grpo(**KL, **{f"engine.{field}": value for field, value in asked.items()}, **FULL)
            for name, asked in engines.items()
        },
        **{name: grpo(**KL, lora=LoraConfig(rank=4, form=form)) for name, form in forms.items()},
        **{name: grpo(train="full", optimizer=OptimizerConfig(lr=1e-3, **asked)) for name, asked in optimizers.items()},
        **{f"base-{name}": grpo(**KL, **{"engine.base": name}) for name in ("bfloat16", "int8", "int4", "nf4")},
        "lora-sharded": nft(**{"engine.replicas": 1, "engine.comm": "reshard"}),
        "lora-offload": nft(**KL, **{"engine.offload": "phases"}),
    }


# What no rank does otherwise than another, and what one rank has no part in.
ON_ONE_RANK = (
    *("grpo-kl-mse", "grpo-guided-half", "grpo-pairs", "grpo-orders", "grpo-gdpo", "distill-mse", "nft-noold-1"),
    *(
        "sampler-cps",
        "sampler-dance",
        "levels-stratified",
        "levels-logit-normal",
        "levels-auto",
        "solver-unipc",
        "levels-continuous",
    ),
    *("lora-factors", "lora-merged", "kept-blocks", "kept-selective", "kept-host", "base-bfloat16", "base-int8"),
    *(
        "optimizer-adafactor",
        "optimizer-cosine",
        "optimizer-average",
        "alignprop-spread",
        "unet-sft",
        "lokr",
        "d3po",
        "nft-kl",
    ),
    *("sd3-full-bfloat16", "flux-grpo", "sd1-grpo", "wan-nft", "loop-grpo", "resumed-floors"),
    *("dpo-online", "grpo-autocast", "grpo-history", "crd"),
)
ON_TWO_RANKS = ("comm-reshard", "sync-every", "lora-sharded", "context-parallel")


def cases(folder: Path) -> dict[str, Case]:
    ahead: dict[str, Any] = {"rollouts": 4, "rollout.ahead": 1}
    late: dict[str, Any] = {"rollouts": 4, "rollout.ahead": 2, "correction": TRUNCATED, "rollout.max_log_ratio": 1e9}
    there = ServersConfig(weights_folder=folder / "served", patience=20)
    later = {"rollout.servers": there, "rollout.source": "http://later"}
    evaluated = EvaluationConfig(average=True)
    small: dict[str, Any] = {
        "evaluation.samples": 4,
        "evaluation.final_samples": 4,
        "checkpoint.every": 2,
        "evaluation.every": 2,
    }
    guided = replace(SDE, guidance=Guidance(3.0), window=RandomWindow(1, high=2))
    split = replace(SDE, guidance=Guidance(2.0))
    configs = {**clipped_cases(), **sampling_cases(), **noised_cases(folder), **machine_cases()}
    sizes: dict[str, Any] = {"sizes": ("16x16", "16x24"), "kind": "sizes"}
    table = {
        **{name: Case(config) for name, config in configs.items()},
        "raft-caption": Case(run(o.Raft(best=0.5, compare="caption"), ODE, noising=NOISED), captioned_job),
        "unet-grpo": Case(
            run(o.Grpo(), replace(SDE, sampler=Stochastic("ddim", 1.0)), **KL, **{"passes.minibatches": 2}),
            partial(job, unet=True),
        ),
        "unet-sft": Case(run(o.Sft(), READ, noising=NOISED, rewards=()), partial(job, unet=True)),
        "nft-ahead": Case(nft(**ahead)),
        "grpo-ahead": Case(grpo(**late)),
        "resumed-grpo": Case(grpo(advantage=AdvantageConfig(history=20, history_min=3)), way="resumed"),
        "resumed-grpo-full": Case(grpo(**KL, **FULL), way="resumed"),
        "resumed-dmd2": Case(
            run(o.Dmd2(fake_updates=2), SINGLE, **{"sampling.sampler": Stochastic("cps", 1.0)}), way="resumed"
        ),
        "resumed-dmd2-gan": Case(
            run(o.Dmd2(fake_updates=2, gan=GAN), SINGLE, **{"sampling.sampler": Stochastic("cps", 1.0)}), way="resumed"
        ),
        "resumed-tdm-r1": Case(run(o.TdmR1(guidance=1.0), replace(SDE, sampler=Ode()), train="lora"), way="resumed"),
        "resumed-adjoint": Case(run(o.AdjointMatching(scale=1.0), EVERY, rewards=("neat",)), way="resumed"),
        "resumed-prodigy": Case(grpo(optimizer=OptimizerConfig("prodigy", lr=1.0)), way="resumed"),
        "distill-sources": Case(
            run(o.Distill(teacher=(f"even={BASE}", f"odd={BASE}"), guidance=("odd=2",), match="sample_mse"), SINGLE, **KL),
            job_of_sources,
        ),
        "resumed-gardo": Case(
            run(o.Gardo(gate=Doubt(window=2), reset_after=2), SDE, rollouts=4, **{"passes.minibatches": 2}), way="resumed"
        ),
        "resumed-nft": Case(nft(rollouts=3, **{"kl.coef": 0.1, "kl.ema_coef": 0.5, "kl.ema_rise": 0.1}), way="resumed"),
        "resumed-floors": Case(
            grpo(rewards=("bold", "neat"), advantage=AdvantageConfig(floors=("neat=0.3",), floor_lr=1.0)), way="resumed"
        ),
        "resumed-ahead": Case(grpo(**late), way="resumed"),
        "served-grpo": Case(grpo(**later, correction=TRUNCATED), way="served"),
        "served-refilled": Case(grpo(replace(SDE, groups=RefilledGroups()), **later, correction=TRUNCATED), way="served"),
        "served-scouted": Case(nft(replace(ODE, groups=ScoutedGroups(9, 2)), **later), way="served"),
        "replayed-refilled": Case(grpo(replace(SDE, groups=RefilledGroups())), way="replayed"),
        "served-nft-full-ahead": Case(
            run(
                o.Nft(beta=1.0, old=NoOld()), ODE, **later, noising=NOISED, **{**ahead, **FULL}, **{"passes.minibatches": 2}
            ),
            way="served",
        ),
        "replayed-grpo": Case(grpo(), way="replayed"),
        "replayed-nft": Case(nft(), way="replayed"),
        "loop-grpo": Case(grpo(evaluation=evaluated, **small), way="loop"),
        "context-parallel": Case(
            grpo(
                split, **KL, rewards=(), **{"engine.micro_batch": 2, "engine.context_parallel": 2, "engine.comm": "reshard"}
            ),
            tiny_token_job.job,
        ),
        "sd3-grpo": pipeline(folder, "sd3", grpo(guided, **KL)),
        "sd3-nft": pipeline(folder, "sd3", nft(replace(ODE, guidance=Guidance(3.0)), noising=NoisingConfig(each=2))),
        "sd3-full-bfloat16": pipeline(
            folder, "sd3", grpo(guided, **FULL, **{"engine.compute": "bfloat16", "engine.masters": "bfloat16"}), kind="half"
        ),
        "sd3-nf4": pipeline(folder, "sd3", grpo(guided, **{"engine.base": "nf4"})),
        "sd3-sft-images": pipeline(
            folder,
            "sd3",
            run(o.Sft(), READ, rewards=(), noising=NoisingConfig(each=2), **{"data.images": (str(folder / "foxes"),)}),
            kind="foxes",
        ),
        "sd3-dmd2-gan": pipeline(
            folder,
            "sd3",
            run(
                o.Dmd2(fake_updates=2, gan=GAN),
                replace(SINGLE, sampler=Stochastic("cps", 1.0)),
                **{"data.images": (str(folder / "foxes"),), "engine.checkpointing": "block", "engine.init": "sharded"},
            ),
            kind="foxes",
        ),
        "sd3-sizes": pipeline(folder, "sd3", grpo(guided, rollouts=3), **sizes),
        "flux-grpo": pipeline(folder, "flux", grpo(replace(guided, guidance=Guidance()))),
        "sd1-grpo": pipeline(folder, "sd1", grpo(replace(guided, sampler=Stochastic("ddim", 1.0)))),
        "wan-nft": pipeline(folder, "wan", nft(noising=NoisingConfig(each=2)), frames=5),
        "sana-nft": pipeline(
            folder,
            "sana",
            nft(replace(ODE, guidance=Guidance(4.5)), noising=NoisingConfig(each=2)),
            height=32,
            width=32,
            text_cache=None,
            call=("use_resolution_binning=false", "complex_human_instruction=null", "max_sequence_length=24"),
        ),
    }
    ranks = {**dict.fromkeys(ON_ONE_RANK, (1,)), **dict.fromkeys(ON_TWO_RANKS, (2,))}
    return {name: case._replace(ranks=ranks.pop(name, case.ranks)) for name, case in table.items()}
