"""Recipes: each builds for the built-in models and for others, is recorded and read back, and says where it comes from."""

import contextlib
import functools
import hashlib
import inspect
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from helpers.refusals import refuses
from helpers.settings import leaves

from fluvial.engines.cli.parse import parse_config
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.errors import UsageError
from fluvial.engines.methods import Grpo, PassesConfig, StepKLConfig
from fluvial.engines.methods.table import METHODS, Distill, Dpo, Nft
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import recipes
from fluvial.engines.run.build import check_model
from fluvial.engines.run.config import PipelineConfig, TrainConfig, with_values
from fluvial.engines.run.declared import LinearOld
from fluvial.engines.run.evaluation.config import SuiteConfig
from fluvial.engines.run.files.write import write_all
from fluvial.engines.run.jobs.settings import CheckpointConfig, MachineConfig
from fluvial.engines.run.recipes import HANDWRITING, RECIPES, UNET
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.sampling.config import CleanSamplingConfig, Mask, RolloutConfig, SamplingConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.noising import ContinuousLevels, LogitNormalLevels, NoisingConfig
from fluvial.engines.sampling.samplers import Ode
from fluvial.engines.sampling.tail import Tail
from fluvial.engines.sampling.window import RandomRecorded, RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import LoraConfig

OTHER = "someone/a-model"
FLOW_GRPO = (
    "--sampling.sampler flow_sde --sampling.sampler.eta 0.7 --sampling.group 24 --sampling.guidance.scale 4.5 "
    "--trained first --trained.fraction 0.99 --kl.coef 0.04 --clip-low 1e-4 --advantage.scale batch --advantage.ddof 0 "
    "--advantage.drop-zero --optimizer.lr 3e-4 "
)
DPM = "--sampling.sampler ode --sampling.sampler.solver dpmpp_2m "
# What the papers and their published code have, of each recipe.
PUBLISHED: dict[str, str] = {
    "grpo": FLOW_GRPO + "--passes.minibatches 2",
    "flash": "--sampling.sampler wan_sde --sampling.sampler.eta 1 --sampling.steps 20 --sampling.guidance.scale 4.5 "
    "--sampling.group 4 --sampling.window random --sampling.window.size 1 --sampling.window.high 10 --sampling.window.draw "
    "group --clip-low 1e-3 --kl.coef 0 "
    "--advantage.scale batch --advantage.clip 5 --weighting std_over_b --optimizer.lr 1e-4",
    "dance": "--sampling.sampler dance_sde --sampling.sampler.eta 0.3 --sampling.group 12 --sampling.shared-noise "
    "--kl.coef 0 --trained random --trained.fraction 0.6 --sampling.window all --sampling.window.high 15 --train full "
    "--optimizer.lr 1e-5",
    "cps": "--sampling.sampler cps --sampling.sampler.eta 0.8 --sampling.window.size 3 --form unscaled --kl.coef 0",
    "guard": "--sampling.sampler flow_sde --trained first --clip 2e-6 --optimizer.lr 1e-4 --advantage.scale group",
    "pref-grpo": "--sampling.sampler flow_sde --sampling.sampler.eta 0.7 --sampling.steps 25 --sampling.group 8 --clip 1e-4 "
    "--sampling.shared-noise --trained first --trained.fraction 0.6 --advantage.combine gdpo --kl.coef 0 "
    "--optimizer.lr 1e-5",
    "dppo": "--sampling.sampler flow_sde --kl-threshold 1e-5",
    "ddpo": "--sampling.sampler ddim --sampling.sampler.eta 1 --sampling.steps 50 --sampling.guidance.scale 5",
    "nft": DPM + "--beta 1 --old linear --old.unit updates --noising.each 9 --kl.coef 1e-4",
    "sol-rl": DPM
    + "--beta 1 --sampling.prompts 48 --sampling.group 24 --sampling.groups scouted --sampling.groups.scouts 96 "
    "--sampling.groups.steps 6 --sampling.steps 10 --noising.each 6 --kl.coef 1e-4 --advantage.scale batch",
    "awm": "--weighting ghuber --clip-low 1 --sampling.steps 14 --sampling.prompts 72 --kl.coef 1e-3 --kl.ema-coef 1 "
    "--kl.ema-cap 0.3 --kl.ema-rise 0.001 --sampling.sampler sa_solver --sampling.sampler.eta 0.4 --noising.levels "
    "stratified --noising.each 6",
    "dpo": "--sampling.sampler ode --beta 2000",
    "mapo": "--sampling.prompts 16 --beta 0.1 --temperature 1000 --snr 0.5 --lora.rank 8 --optimizer.lr 1e-5",
    "kto": "--labels column --beta 1000 --utility sigmoid --train full --optimizer.lr 1e-7 --optimizer.warmup 200",
    "dgpo": DPM
    + "--sampling.guidance.scale 4.5 --sampling.guidance.update conditional --noising.levels.highest 5 --noising.draw "
    "rollout --kl.coef 0.02 --beta 100 --clip-low 0.01 --old-samples-from 500 --optimizer.lr 3e-4 --sampling.group 16",
    "crd": "--sampling.sampler ode --beta 1 --match mse --old.rise 0.005 --rollout-policy.delay 75 --kl.coef 0.1 "
    "--passes.minibatches 2 --sampling.group 24",
    "tempflow": "--sampling.group 216 --sampling.window branches --sampling.window.size 1 --sampling.window.samples 6 "
    "--sampling.window.high 9 --kl.coef 0.004 --kl.weight exact --scale 1.73",
    "chunk": "--sampling.sampler flow_sde --sampling.sampler.eta 0.7 --sampling.steps 10 --sampling.group 24 "
    "--sampling.guidance.scale 4.5 --kl.coef 0.04 --clip-low 1e-4 --optimizer.lr 3e-4",
    "densegrpo": "--sampling.sampler flow_sde --sampling.sampler.eta 0.7 --sampling.steps 10 --sampling.group 24 "
    "--sampling.guidance.scale 4.5 --kl.coef 0.04 --clip-low 1e-4 --optimizer.lr 3e-4",
    "tpgrpo": "--sampling.sampler cps --sampling.sampler.eta 0.7 --sampling.steps 10 --sampling.window.high 9 "
    "--sampling.prompts 48 --sampling.group 24 --sampling.guidance.scale 4.5 --kl.coef 1e-4 --clip-low 1e-5 "
    "--clip-high 1e-5 --advantage.scale group",
    "branchgrpo": "--sampling.sampler dance_sde --sampling.sampler.eta 0.3 --sampling.steps 20 --sampling.window splits "
    "--sampling.window.splits 0 3 6 9 --sampling.window.children 2 --sampling.group 16 --clip-low 1e-3 --advantage.clip 5 "
    "--optimizer.lr 1e-5 --optimizer.weight-decay 1e-4",
    "spo": "--sampling.sampler ddim --sampling.sampler.eta 1 --sampling.steps 20 --sampling.guidance.scale 5 --beta 10 "
    "--eps 0.1 --sampling.window candidates --sampling.window.samples 4 --sampling.window.low 4 --margin.size 0.3 "
    "--optimizer.lr 6e-5 --lora.rank 4",
    "lpo": "--sampling.sampler ddim --sampling.sampler.eta 1 --sampling.steps 20 --sampling.guidance.scale 5 --beta 500 "
    "--eps 0.1 --sampling.window candidates --sampling.window.samples 4 --sampling.window.low 0 --margin noise "
    "--margin.low 0.35 --margin.high 0.5 --optimizer.lr 6e-5 --lora.rank 4",
    "gardo": "--sampling.sampler flow_sde --sampling.sampler.eta 0.7 --sampling.steps 10 --sampling.guidance.scale 4.5 "
    "--sampling.prompts 48 --sampling.group 24 --trained first --trained.fraction 0.89 --passes.minibatches 2 "
    "--clip-low 1e-4 --kl.coef 0.04 --gate doubt --gate.share 0.1 --gate.window 20 --gate.least 0.02 "
    "--gate.most 0.2 --reset-kl 3e-4 --reset-after 15 --adv-clip 5 --optimizer.lr 3e-4",
    "d3po": "--sampling.sampler ddim --sampling.steps 20 --sampling.guidance.scale 5 --sampling.group 2 --beta 0.1 "
    "--eps 0.1 --sampling.shared-noise --optimizer.lr 3e-5",
    "alignprop": "--sampling.sampler ddim --sampling.sampler.eta 1 --sampling.steps 50 --sampling.guidance.scale 5 --last 8 "
    "--spread 5 --target 10 --scale 0.01 --optimizer.lr 1e-3 --sampling.prompts 128",
    "adjoint": "--sampling.sampler ddim --sampling.sampler.eta 1 --sampling.steps 50 --sampling.guidance.scale 7.5 "
    "--sampling.guidance.update conditional --scale 100 --index current --quantile 0.9 --optimizer.lr 3e-6 "
    "--trained stratified --trained.fraction 0.6 --trained.first 2 --trained.rest 2 --sampling.prompts 125",
    "raft": "--sampling.sampler ode",
    "sft": "",
    "distill": "--match mean_kl --sampling.group 1",
    "opd": "--match sample_mse --sampling.sampler ode --sampling.prompts 72 --sampling.group 1 "
    "--guidance @drawbench-like=4.5 @ocr=4.5 @geneval=1 --sampling.guidance.scale 4.5 --trained first "
    "--trained.fraction 0.99 --optimizer.lr 3e-4",
    "dmd2": "--sampling.steps 4 --guidance 4 --fake-updates 5 --optimizer.lr 1e-5 --optimizer.ema-decay 0",
    "ac-dmd": "--sampling.steps 4 --sampling.sampler cps --sampling.sampler.eta 0.9 --guidance 4.5 --fake-updates 10 "
    "--fake.lr 3e-5 --optimizer.lr 3e-5 --optimizer.ema-decay 0.99 --consistency 0.01 --span 0.2",
    "tdm-r1": "--sampling.prompts 48 --sampling.group 24 --sampling.steps 4 --guidance 4.5 --fake.lr 3e-4 --fake-kl 0.02 "
    "--tdm 0.3 --surrogate.optimizer.lr 3e-4 --surrogate.beta 10 --surrogate.clip 1e-3 --optimizer.lr 7.5e-5 --form square",
    "rtdmd": "--sampling.steps 4 --sampling.sampler cps --sampling.sampler.eta 0.9 --sampling.group 24 --clip 1e-5 "
    "--coef 1e-3 --guidance 4.5 --fake.lr 3e-5 --optimizer.lr 3e-6 --advantage.scale batch --first 2",
    "refl": "--sampling.steps 40 --sampling.window.low 30 --margin 2 --scale 1e-3 --optimizer.lr 1e-5 --train full",
    "srpo": "--sampling.steps 25 --margin 0.7 --towards 0.1 0.25 --away 0.3 0.01 --optimizer.lr 5e-6 --train full",
    "tdm": "--sampling.steps 4 --guidance 4 --interval reverse --form huber --sampling.prompts 128",
    **dict.fromkeys(("handwriting", "words", "edit-words"), FLOW_GRPO + "--passes.minibatches 1"),
}

# Of the settings of each recipe, for the built-in models and for another: the built-in ones' numbers are in no paper.
DIGESTS = """
    grpo 1e897a69  flash 59812a3e  dance dbdab2f2  cps 5519fd20  guard 7afe85d2
    pref-grpo 0b9f9aab  dppo ff262282  ddpo 6093e65e  tempflow 05a80793  chunk ce3f564e
    densegrpo a607e516  tpgrpo 8724477d  branchgrpo 42745faf  gardo 77242a15  d3po d26735a0
    spo 1c996beb  lpo a3cfd93e  nft 9b1004db  sol-rl 87115a62  awm 59b8261f
    dgpo caabc35e  crd 6ea5cc9d  raft 2b3cc9e7  sft c0b735de  dpo 84781b7b
    mapo 91bf3020  kto 549d1b93  alignprop 99cabfa7  adjoint eb6e4e48  refl f1c1a7d5
    srpo f928d797  distill de878f1f  opd a5fce3d4  dmd2 9fcbe2a5  ac-dmd 5b0da7dd
    rtdmd 1b0221a5  tdm 1169702b  tdm-r1 ed1c6ba6  handwriting 5ed001cd  words f796202c
    edit-words bf13b015
"""


def test_every_objective_has_a_recipe() -> None:
    """And every recipe an objective of the table."""
    assert {recipe().method.method_name for recipe in RECIPES.values()} == set(METHODS)
    assert set(PUBLISHED) == set(RECIPES)


def test_no_setting_of_a_recipe_changes_unnoticed() -> None:
    """A new number comes with a new digest, by intent; no entry of the table has a key that nobody reads."""
    found = {}
    for name, recipe in RECIPES.items():
        records = [as_record(recipe(model)) for model in (*MODELS, OTHER)]
        found[name] = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:8]
    words = DIGESTS.split()
    assert found == dict(zip(words[::2], words[1::2], strict=True))
    window = {"sampling": {"window": {"kind": "random", "size": 5}, "group": 8}}
    merged = recipes._merge(window, {"sampling": {"window": {"kind": "all"}}})
    assert merged == {"sampling": {"window": {"kind": "all"}, "group": 8}}  # nothing of the other kind stays
    for entry in recipes.TABLE.values():
        assert {*entry} <= {"help", "model", "published", "large", "small", "on"}
        assert {*entry.get("on", {})} <= {*MODELS}


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_other_models_are_the_published(name: str) -> None:
    """To type them changes nothing. What is found on the built-in models, which is quick, holds for them alone."""
    config, tuned = RECIPES[name](OTHER), RECIPES[name](HANDWRITING)
    assert config.model == OTHER
    assert parse_config(config, "fluvial", PUBLISHED[name].split()) == config
    of_all = ("dance", "adjoint", "branchgrpo", "refl", "srpo", "kto")
    assert config.train == ("full" if name in of_all else "lora")
    assert config.lora.targets is None  # the model's own
    assert (config.data.order, config.optimizer.ema_interval, config.optimizer.ema_repeats) == ("epochs", 1, 1)
    assert replace(config, model=HANDWRITING) != tuned


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_model_that_it_is_made_for(name: str) -> None:
    """The built-in one that its sampler is for, by default, evaluated on hundreds of samples; a large one on fewer."""
    config = RECIPES[name]()
    own = {**dict.fromkeys(("ddpo", "d3po", "spo", "lpo"), UNET), "words": "words", "edit-words": "edit-words"}
    assert config.model == own.get(name, HANDWRITING)
    check_model(config, "epsilon" if config.model == UNET else "velocity")
    assert config.evaluation.final_samples == (500 if name == "ddpo" else 1000)  # as bench/README.md says
    assert RECIPES[name](OTHER).evaluation.final_samples < 100
    if name in ("dpo", "mapo", "kto", "raft", "sft"):
        check_model(RECIPES[name](UNET), "epsilon")


def test_supervised_runs_fit_pipelines_without_an_adapter() -> None:
    """Their levels are those of the schedule then; levels between its steps are refused."""
    config = RECIPES["sft"](OTHER)
    check_model(config, "velocity", recorded=True)
    between = with_values(config, {"noising.levels": ContinuousLevels()})
    tail = with_values(RECIPES["grpo"](OTHER), {"sampling.window": RandomWindow(1, high=2, tail=Tail(fraction=0.5))})
    for run, field in ((between, "noising.levels"), (tail, "sampling.window.tail")):
        refuses(field, check_model, run, "velocity", recorded=True)


RUNS: list[TrainConfig] = [
    *(recipe(*model) for recipe in RECIPES.values() for model in ((), (OTHER,))),
    TrainConfig(
        Path("out"),
        prompts=("a.jsonl=2", "b.txt"),
        rewards=("characters", "neat=0.5"),
        seed=2**62,
        updates=8,
        rollout=RolloutConfig(autocast=True, max_log_ratio=0.5),
        method=Grpo(
            sampling=SamplingConfig(
                prompts=2,
                group=2,
                shared_noise=True,
                window=RandomWindow(3, low=1, high=7),
                guidance=Guidance(2.0, "ugly", "two", "conditional"),
            ),
            trained=RandomRecorded(0.3),
            form="no_const",
            reduction="sum",
            advantage=AdvantageConfig("none", 1e-3, 2.0, "gdpo"),
            correction=Mask("trajectory", 1.5),
            kl=StepKLConfig(0.1, weight="exact"),
            passes=PassesConfig(2, 2),
        ),
        lora=LoraConfig(4, 8.0, ("to_q", "to_k")),
        optimizer=OptimizerConfig(betas=(0.5, 0.6)),
        engine=MachineConfig(comm="reshard"),
        pipeline=PipelineConfig(weights=Path("base")),
        checkpoint=CheckpointConfig(folder="s3://bucket/run", resume_from="elsewhere"),
    ),
    TrainConfig(
        Path("out"),
        train="lora",
        method=Nft(
            old=LinearOld(delay=7),
            mode="binary",
            sampling=CleanSamplingConfig(sampler=Ode("dpmpp_2m")),
            noising=NoisingConfig(3, LogitNormalLevels()),
        ),
    ),
    TrainConfig(Path("out"), method=Distill(teacher=("runs/teacher",))),
    TrainConfig(
        Path("out"),
        Grpo(),
        model="folder/of/one",
        prompts=("prompts.txt",),
        pipeline=PipelineConfig(heldout=("heldout.txt",), text_cache=Path("texts"), call=("system_prompt=", "n=3")),
    ),
    TrainConfig(Path("out"), method=Dpo(preferences=Path("pairs"), sampling=CleanSamplingConfig())),
]


@pytest.mark.parametrize("config", RUNS, ids=lambda config: f"{config.method.method_name}-{config.model}")
def test_nothing_is_lost_in_a_record(config: TrainConfig) -> None:
    """Through JSON, and through TOML, which leaves out what is not set; what was written is written again."""
    record = json.loads(json.dumps(as_record(config)))
    assert record["method"]["name"] == config.method.method_name
    assert read_record(record) == config
    assert as_record(read_record(record)) == record
    assert read_record(tomllib.loads(write_all(None, config))) == config


def test_a_group_of_settings_has_its_own_class() -> None:
    """The engine's own settings alone, of the class that it extends, lack a micro-batch."""
    for name, value in {"engine": EngineConfig(), "evaluation": SuiteConfig(), "data": ()}.items():
        with pytest.raises(TypeError, match=rf"{name} is a.* {type(value).__name__}, expected \w+Config"):
            with_values(TrainConfig(Path("out"), Grpo()), {name: value})


def test_a_record_of_another_version() -> None:
    """A field that there is not is said, never passed over."""
    record = as_record(RECIPES["grpo"]())
    for changed, words in (
        ({"novel": 1}, "unknown fields novel @ run"),
        ({"rollout": {**record["rollout"], "novel": 1}}, "unknown fields novel @ run.rollout"),
        ({"method": {**record["method"], "novel": 1}}, "unknown fields novel @ run.method"),
        ({"method": {"name": "dppoo"}}, "method is 'dppoo', expected one of .*; did you mean 'dppo'"),
        ({"method": {}}, "expected an object with the name of a method, one of grpo, .* @ run.method"),
        ({"method": {"name": "nft", "trained": {"kind": "all"}}}, "unknown fields trained @ run.method"),
        ({"updates": "3"}, "updates is a str, expected an integer"),
        ({"method": {"name": "grpo", "kl": {"weight": "exat"}}}, "kl.weight is 'exat', expected .*did you mean 'exact'"),
        ({"max_log_ratio": float("inf")}, "max_log_ratio is inf, expected a finite number"),
        ([], "run"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            read_record({**record, **changed} if isinstance(changed, dict) else changed)  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)


def test_help_lists_the_recipes_with_their_papers(fluvial: Any) -> None:
    """In its first line, which is all that a person sees before they choose."""
    shown = fluvial("train", "--help")
    for name, recipe in RECIPES.items():
        first, *_ = (inspect.getdoc(recipe) or "").splitlines()
        assert re.search(r"\(arXiv \d{4}\.\d{5}", first), name
        assert re.search(rf"^  {name} +{re.escape(first)}$", shown, re.MULTILINE), name


def others_of(kind: Any, value: Any) -> list[Any]:
    """Return other values of a field of numbers or choices."""
    choices = [choice for each in (kind, *get_args(kind)) if get_origin(each) is Literal for choice in get_args(each)]
    if type(value) in (int, float):
        choices = [type(value)(2 * value + 1), type(value)(value / 2)]
    return [other for other in choices if other != value]


@pytest.mark.parametrize("name", RECIPES)
def test_its_fields_are_flags(name: str) -> None:
    """The command line knows those of the recipe's method, whatever values they take, and changes nothing else."""
    default, words = RECIPES[name](), list[str]()
    expected = default
    for path, kind in leaves(default.method):
        field = ".".join(path)
        for other in others_of(kind, functools.reduce(getattr, path, default.method)):
            with contextlib.suppress(ValueError):  # it has no meaning there
                expected = with_values(expected, {f"method.{field}": other})
                words += [f"--{field.replace('_', '-')}", str(other)]
                break
    assert len(words) >= 2
    assert parse_config(default, "fluvial", words) == expected
