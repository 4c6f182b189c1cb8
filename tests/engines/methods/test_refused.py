"""Settings without a meaning: tables of runs that are refused, by the field that the message names, and of jobs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.settings import settings_of

from fluvial.core.transitions import Transition
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.models.lora import Dora, Lokr, LoraConfig

# By the field that is named, what is refused when it is built: a method, and words or field=value.
REFUSED: dict[str, tuple[str, ...]] = {
    "sampling.sampler": (
        *("grpo ode", "guard ode", "guard cps", "guard ddim", "raft compare=data", "raft compare=data dpm", "rtdmd", "tdm"),
        *("ac-dmd fake_updates=2", "refl", "adjoint ode", "nft scouted", "grpo sampling.sampler=sde"),
    ),
    "sampling.sampler.solver": ("distill taught dpm",),
    "sampling.shared_noise": (
        *(f"nft old=none {sampler} sampling.shared_noise=True" for sampler in ("ode", "sampling.sampler=sa_solver")),
        *("grpo branches sampling.shared_noise=True", "branchgrpo tree sampling.shared_noise=True"),
    ),
    "sampling.group": (
        *(f"{method} sampling.group=1" for method in ("grpo", "dpo ode", "raft ode", "raft compare=data ode")),
        *("kto labels=reward ode sampling.group=1", "grpo refilled sampling.group=1"),
        *("grpo branches sampling.group=6", "branchgrpo tree sampling.group=4"),
        "nft scouted ode sampling.steps=9 sampling.groups.scouts=2",
    ),
    "sampling.groups": ("grpo refilled advantage.combine=gdpo", "gardo refilled", "dpo preferences ode refilled"),
    "sampling.groups.steps": ("nft scouted ode",),
    "sampling.window": (
        *("nft window", "dpo window", "raft window"),
        *("grpo window sampling.window.size=5", "grpo branches sampling.window.size=5 sampling.group=12"),
        *("rtdmd cps window", "adjoint window", "alignprop window", "grpo branches ode", "branchgrpo tree ode"),
        *("grpo sampling.window=moving sampling.window.size=4", "grpo cut ode sampling.window.tail.fraction=0.5"),
        *("grpo states", "d3po states", "spo tree", "branchgrpo states", "grpo served tree"),
        "densegrpo window sampling.window.draw=sample",
    ),
    "sampling.window.draw": (
        *("grpo window sampling.window.size=4 sampling.window.draw=call", "grpo refilled window sampling.window.draw=call"),
        "grpo sampling.window=scattered sampling.window.size=4 sampling.window.draw=sample",
        "grpo window sampling.window.draw=sample sampling.window.tail.fraction=0.5",
    ),
    "sampling.window.high": (
        *("grpo cps window sampling.window.size=1", "grpo cps window sampling.window.draw=sample"),
        "grpo cps form=unscaled kl.coef=0.1",
    ),
    "sampling.window.low": ("spo states sampling.window.low=6",),
    "sampling.window.samples": ("grpo branches sampling.window.samples=1",),
    "sampling.window.splits": tuple(
        f"branchgrpo tree sampling.window.splits={splits}" for splits in ("(0,1,5)", "()", "(2,1)", "(0,0)", "(-1,)")
    ),
    "sampling.window.every": ("grpo sampling.window=moving sampling.window.size=2 sampling.window.every=0",),
    "sampling.window.decay_from": ("grpo sampling.window=moving sampling.window.size=2 sampling.window.decay_from=1",),
    "sampling.window.share_prefix": tuple(
        f"grpo {words} sampling.window.share_prefix=True" for words in ("window", "cut sampling.group=1", "cut ode")
    ),
    "sampling.window.tail": ("densegrpo window sampling.window.high=3 sampling.window.tail.fraction=0.5",),
    "advantage": ("branchgrpo tree advantage.scale=batch",),
    "advantage.combine": ("densegrpo advantage.combine=gdpo",),
    "advantage.drop_zero": ("crd ode lora advantage.drop_zero=True",),
    "advantage.extremes": ("grpo advantage.extremes=3",),
    "advantage.rescale": ("grpo advantage.rescale=1.0",),
    "advantage.history": (
        *("grpo refilled advantage.history=20", "densegrpo advantage.history=16"),
        *(f"grpo advantage.history=16 advantage.{also}" for also in ("scale=batch", "combine=gdpo")),
        "grpo advantage.floors=('a=1',) advantage.history=32",
    ),
    "advantage.history_min": ("grpo advantage.history_min=8", "grpo advantage.history=8"),
    "advantage.floors": (
        *("grpo refilled advantage.floors=('reward=0.5',)", "densegrpo advantage.floors=('a=1',)"),
        *(f"grpo advantage.floors=({text!r},)" for text in ("ocr", "ocr=", "=0.5", "ocr=high", "ocr=nan", "ocr=inf")),
        "grpo advantage.floors=('b=1','b=2')",
    ),
    "advantage.floor_lr": ("grpo advantage.floor_lr=0.5",),
    "form": ("guard form=unscaled", "grpo form=unscaled correction=mask"),
    "match": ("distill taught ode match=mean_kl",),
    "teacher": ("distill",),
    "train": ("nft ode", "gardo gate=doubt"),
    "kl.coef": ("gardo lora kl.coef=0.0",),
    "kl.weight": ("grpo kl.weight=exact",),
    "kl.guidance": ("grpo kl.guidance=2.0", "gardo lora kl.guidance=2.0"),
    "kl.ema_rise": ("nft ode lora kl.ema_rise=0.5",),
    "gate.share": ("gardo lora gate=doubt gate.share=0.3",),
    "last": ("alignprop ode last=5",),
    "first": ("rtdmd cps first=4",),
    "surrogate.steps": ("tdm-r1 ode lora surrogate.steps=5",),
    "highest": ("srpo ode lowest=0.97",),
    "huber": ("dmd2 cps huber=0.1 fake_updates=1",),
    "gan.weight": ("dmd2 cps opposed gan.weight=-1.0",),
    "fake_updates": ("ac-dmd cps fake_updates=3",),
    "passes.minibatches": ("grpo passes.minibatches=3 updates=3",),
    "updates": ("grpo passes.minibatches=2 updates=3",),
    "noising.each": ("raft ode noising.each=5", "raft ode noising.each=3 noising.levels=schedule noising.levels.skip=2"),
    "noising.draw": ("dgpo ode lora noising.draw=sample", "raft ode noising.draw=group"),
    "noising.levels": ("raft ode noising.levels=even",),
    "noising.levels.skip": tuple(
        f"raft ode noising.levels={kind} noising.levels.highest=3 noising.levels.skip={skip}"
        for kind, skip in (("schedule", 3), ("stratified", 4))
    ),
    "trained.fraction": ("grpo trained=first",),
    "rewards": ("dpo preferences ode rewards=('brightness',)",),
    "prompts": ("dpo preferences ode prompts", "dmd2 cps opposed photos prompts"),
    "data.images": ("raft ode photos", "dmd2 cps fake_updates=1 photos"),
    "rollout.autocast": tuple(f"{words} rollout.autocast=True" for words in ("grpo", "rtdmd cps", "grpo graphs")),
    "rollout.reuse": (
        *("grpo rollout.reuse=keys", "grpo lora rollout.reuse=merged", "grpo merged train=full"),
        *(f"grpo {kind} rollout.source=http://127.0.0.1:1" for kind in ("keys", "merged")),
        "grpo keys engine.compile=reduce-overhead",
    ),
    "rollout.source": ("grpo graphs rollout.source=http://127.0.0.1:1",),
    "rollout.store": ("nft scouted ode sampling.steps=9 rollout.store=x",),
    "rollout.max_log_ratio": ("raft ode rollout.max_log_ratio=0.1",),
    "rollout.max_invalid": tuple(f"grpo rollout.max_invalid={most}" for most in (-0.1, 1.0, "nan")),
    "rollout.ahead": (
        *("grpo refilled ahead", "grpo graphs ahead", "grpo ahead rollout.source=replayed:x", "grpo rollout.ahead=-1"),
        "sft reading rollout.ahead=1",
    ),
    "rollout.step_cache": (
        *("grpo cached", "nft old=none cached noisy_solver", "grpo cut cached engine.compile=reduce-overhead"),
        "grpo cut rollout.step_cache=guidance",
    ),
    "rollout.step_cache.threshold": ("grpo cut cached rollout.step_cache.threshold=0",),
    "correction": ("grpo ahead correction=none",),
    "correction.threshold": ("grpo correction=mask correction.threshold=0.5",),
    "engine.context_parallel": tuple(
        f"{words} engine.context_parallel=2" for words in ("dmd2 cps opposed", "grpo keys", "grpo cut cached")
    ),
    "engine.base": ("grpo merged engine.base=int8", "grpo engine.base=nf4", "grpo lora served engine.base=int8"),
    "engine.comm": ("grpo merged engine.comm=reshard", "grpo graphs engine.comm=reshard"),
    "engine.offload": (
        *("grpo merged engine.offload=1", "grpo graphs engine.offload=blocks", "grpo ahead engine.offload=phases"),
    ),
    "engine.checkpointing": ("grpo graphs engine.checkpointing=selective",),
    "engine.compile": ("grpo engine.compile=on", "dpo preferences ode engine.compile=reduce-overhead"),
    "engine.masters": ("grpo lora engine.masters=bfloat16",),
    "engine.micro_batch": (
        *("grpo engine.micro_batch=fast", "grpo engine.micro_batch=0", "grpo auto window sampling.window.draw=call"),
        *("dpo auto ode noising.draw=call", "alignprop auto last=2"),
    ),
    "old.cap": ("nft ode lora old.cap=1.0",),
    "old.delay": ("nft ode lora old.delay=-1",),
    "beta": ("nft ode lora beta=0.0", "dpo ode beta=0.0"),
    "power": ("awm ode power=2.0",),
    "best": ("raft ode best=0.0",),
    "clip": ("guard clip=-1.0",),
}
ROWS = [(field, line) for field, lines in REFUSED.items() for line in lines]


def build(line: str, **others: Any) -> TrainConfig:
    """Return the run of a method with the settings of its words, and others by dotted names."""
    sampling = SamplingConfig(prompts=2, group=2, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
    changes = {"sampling": sampling, **settings_of(line)}
    return tiny.config(Path("out"), **{**changes, **others})


@pytest.mark.parametrize(("field", "line"), ROWS, ids=[line for _, line in ROWS])
def test_what_has_no_meaning(field: str, line: str) -> None:
    """It is refused when it is built, in one line that begins with the field."""
    refuses(rf"^(method\.)?{field} (is|has|holds|names) ", build, line)


def test_a_number_of_samples_that_is_not_chosen_yet_is_refused() -> None:
    refuses(r"^engine\.micro_batch is auto", lambda: build("grpo auto").samples_per_pass)


@pytest.mark.parametrize("form", [Dora(), Lokr()], ids=str)
def test_servers_take_merged_weights_of_any_form(form: Any) -> None:
    build("grpo lora served", lora=LoraConfig(form=form))


def drift(level: torch.Tensor, level_next: torch.Tensor, *, eta: float) -> Transition:
    return Transition(torch.ones(1), level_next[:1], eta * level[:1])


EPSILON, BRIGHT = {"prediction": "epsilon"}, {"evaluators": {"heldout": tiny.brightness}}
WEIGHTED = {"prompts": [Prompt("0", weight=2.0), Prompt("1")]}
# Runs that do not fit a model or a job, which are refused before the first rollout: what the message names.
UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", EPSILON, "sampling.sampler is 'flow_sde'"),
    ("grpo ddim", {}, "sampling.sampler is 'ddim'"),
    ("grpo window sampling.window.tail.fraction=0.5 ddim", EPSILON, "sampling.window.tail is "),
    ("nft old=none ode", EPSILON, "method is 'nft'"),
    ("awm ode", EPSILON, "method is 'awm'"),
    ("distill taught ode match=clean_mse", EPSILON, "method is 'distill'"),
    ("raft ode noising.levels=continuous", EPSILON, "noising.levels is 'continuous'"),
    ("raft ode engine.implementation=triton", {}, "implementation is 'triton'"),
    ("grpo graphs", {}, "engine.compile is 'reduce-overhead'"),
    ("grpo keys", {}, "rollout.reuse is 'keys'"),
    # What the job lacks
    ("sft reading", {"data": None}, "sft learns from data"),
    ("dmd2 cps opposed", {"data": None}, "dmd2 learns from data"),
    ("dpo preferences ode", {"encode": None}, "cannot be used: "),
    ("dpo preferences ode", {}, "preferences given/preferences.jsonl cannot be read"),
    ("distill taught ode", {"load": None}, "teacher cannot be loaded"),
    ("raft ode compare=caption", {"prompts": [Prompt(text, image=Path(text)) for text in "01"]}, "compare is caption"),
    ("kto ode", {}, "column label, and the record of '0' has none"),
    ("grpo", {"rewards": {}}, "grpo learns from rewards"),
    *(
        ("kto ode", {"prompts": [Prompt("0", metadata={"label": label})]}, f"'0' has {label!r} there")
        for label in (2, "good")
    ),
    # Prompts, rewards and evaluators
    ("grpo sampling.guidance.scale=2.0 sampling.guidance.negative=abc", {}, "sampling.guidance.negative: "),
    ("grpo", {"prompts": ("0", "7x")}, "prompts[1]: prompt '7x'"),
    ("grpo", {"prompts": ()}, "prompts is empty"),
    ("grpo", {"heldout": ("z",)}, "heldout[0]: prompt 'z'"),
    ("grpo", {"prompts": [Prompt("0", negative="1")]}, "prompt '0' has a negative prompt"),
    ("grpo data.order=draws", WEIGHTED, "data.order is draws"),
    ("grpo data.order=distinct", WEIGHTED, "data.order is distinct"),
    ("grpo", {"rewards": {"it": lambda images: images}}, "rewards 'it' has the signature"),
    ("grpo", {"rewards": {"it": lambda images, prompts, record: images}}, "rewards 'it' has the signature"),
    ("grpo", {"rewards": {"it": "bright"}}, "rewards 'it' is of type str"),
    ("grpo", {"evaluators": {"it": lambda images: images}}, "evaluator 'it' has the signature"),
    (
        "grpo watched evaluation.every=0",
        {"evaluators": {"heldout": tiny.contrast}},
        "evaluation.stop_when_gamed has no effect",
    ),
    ("grpo watched", {"evaluators": {}}, "the evaluator 'brightness' is a reward of the run"),
    ("grpo watched", {"evaluators": {"a": tiny.contrast, **BRIGHT["evaluators"]}}, "the evaluator 'heldout' is a reward"),
    ("gardo lora gate=doubt rewards=('contrast',)", {}, "rewards is "),
    ("gardo lora features=nowhere", {}, "features is 'nowhere'"),
    ("grpo rewards=('brightness',) advantage.floors=('contrast=1',)", {}, "advantage.floors names 'contrast'"),
    ("grpo rewards=('brightness',) advantage.floors=('brightness=1',)", {}, "advantage.floors names every reward"),
    ("grpo rewards=('brightness','contrast=2') advantage.floors=('contrast=1',)", {}, "rewards gives it the weight 2"),
]


@pytest.mark.parametrize(("line", "changes", "names"), UNFIT, ids=[f"{place}: {row[2]}" for place, row in enumerate(UNFIT)])
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of the compiler
def test_what_does_not_fit_the_model_or_the_job(one: World, line: str, changes: dict[str, Any], names: str) -> None:
    """It is refused in one line, before the first rollout."""

    def make() -> None:
        run = tiny.Run(build(line), one, tiny.job(**changes))
        if "features" in line:  # which are imported for the first rewards
            run.rollout()

    refuses(re.escape(names), make)


@pytest.mark.parametrize(
    ("sampler", "names"),
    [
        (lambda level, level_next, *, eta: level, "Tensor"),
        (drift, "shape [1]"),
        (lambda level, level_next, *, eta: 1 / 0, "fails"),
    ],
)
def test_what_a_custom_sampler_returns(one: World, sampler: Any, names: str) -> None:
    """It is tried on the model's schedule before the first rollout."""
    refuses(re.escape(names), tiny.Run, build("grpo", **{"sampling.sampler": Stochastic(sampler, eta=0.3)}), one)
