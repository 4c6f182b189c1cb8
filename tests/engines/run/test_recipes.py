"""Recipes: each builds for the built-in models and for others, is recorded and read back, and says where it comes from."""

import inspect
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.config import drop_unset
from fluvial.engines.cli.parse import parse_config
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.errors import UsageError
from fluvial.engines.methods import Grpo, PassesConfig, StepKLConfig
from fluvial.engines.methods.table import METHODS, Distill, Dpo, Nft
from fluvial.engines.run.config import PipelineConfig, TrainConfig, with_values
from fluvial.engines.run.declared import LinearOld
from fluvial.engines.run.evaluation.config import SuiteConfig
from fluvial.engines.run.jobs.settings import CheckpointConfig, MachineConfig
from fluvial.engines.run.recipes import HANDWRITING, RECIPES, UNET
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.run.validate import check_model
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig
from fluvial.engines.sampling.correction import CorrectionConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.noising import ContinuousLevels, LogitNormalLevels, NoisingConfig
from fluvial.engines.sampling.samplers import Ode, SaSolver, Stochastic
from fluvial.engines.sampling.window import AllSteps, Branches, FirstRecorded, RandomRecorded, RandomWindow
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.models import LoraConfig, Prediction

OTHER = "someone/a-model"
ODE: dict[str, Any] = {"sampling.sampler.kind": "ode"}
# What the papers and their published code have, of each recipe.
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": {
        "sampling.sampler.name": "flow_sde",
        "sampling.sampler.eta": 0.7,
        "sampling.group": 24,
        "sampling.guidance.scale": 4.5,
        "trained": FirstRecorded(0.99),
        "kl.coef": 0.04,
        "clip_low": 1e-4,
        "advantage.scale": "batch",
        "advantage.ddof": 0,
        "advantage.drop_zero": True,
        "passes.minibatches": 2,
        "optimizer.lr": 3e-4,
    },
    "dance": {
        "sampling.sampler.name": "dance_sde",
        "sampling.sampler.eta": 0.3,
        "sampling.group": 12,
        "sampling.shared_noise": True,
        "trained": RandomRecorded(0.6),
        "sampling.window": AllSteps(high=15),
        "train": "full",
        "optimizer.lr": 1e-5,
        "kl.coef": 0.0,
    },
    "cps": {"sampling.sampler": Stochastic("cps", 0.8), "sampling.window.size": 3, "form": "unscaled", "kl.coef": 0.0},
    "guard": {
        "sampling.sampler.name": "flow_sde",
        "trained.kind": "first",
        "clip": 2e-6,
        "optimizer.lr": 1e-4,
        "advantage.scale": "group",
    },
    "dppo": {"sampling.sampler.name": "flow_sde", "kl_threshold": 1e-5},
    "ddpo": {
        "sampling.sampler.name": "ddim",
        "sampling.sampler.eta": 1.0,
        "sampling.steps": 50,
        "sampling.guidance.scale": 5.0,
    },
    "nft": ODE
    | {
        "sampling.sampler.solver": "dpmpp_2m",
        "beta": 1.0,
        "old.kind": "linear",
        "old.unit": "updates",
        "noising.each": 9,
        "kl.coef": 1e-4,
    },
    "awm": {
        "weighting": "ghuber",
        "clip_low": 1.0,
        "sampling.steps": 14,
        "sampling.prompts": 72,
        "kl.coef": 1e-3,
        "kl.ema_coef": 1.0,
        "kl.ema_cap": 0.3,
        "kl.ema_rise": 0.001,
        "sampling.sampler": SaSolver(0.4),
        "noising.levels.kind": "stratified",
        "noising.each": 6,
    },
    "dpo": ODE | {"beta": 2000.0},
    "dgpo": ODE
    | {
        "sampling.sampler.solver": "dpmpp_2m",
        "sampling.guidance.scale": 4.5,
        "sampling.guidance.update": "conditional",
        "noising.levels.highest": 5,
        "noising.draw": "rollout",
        "kl.coef": 0.02,
        "beta": 100.0,
        "clip_low": 0.01,
        "old_samples_from": 500,
        "optimizer.lr": 3e-4,
        "sampling.group": 16,
    },
    "crd": ODE
    | {
        "beta": 1.0,
        "match": "mse",
        "old.rise": 0.005,
        "rollout_policy.delay": 75,
        "kl.coef": 0.1,
        "passes.minibatches": 2,
        "sampling.group": 24,
    },
    "tempflow": {
        "sampling.group": 216,
        "sampling.window": Branches(1, 6, high=9),
        "kl.coef": 0.004,
        "kl.weight": "exact",
        "scale": 1.73,
    },
    "d3po": {
        "sampling.sampler.name": "ddim",
        "sampling.steps": 20,
        "sampling.guidance.scale": 5.0,
        "sampling.group": 2,
        "sampling.shared_noise": True,
        "beta": 0.1,
        "eps": 0.1,
        "optimizer.lr": 3e-5,
    },
    "alignprop": {
        "sampling.sampler.name": "ddim",
        "sampling.sampler.eta": 1.0,
        "sampling.steps": 50,
        "sampling.guidance.scale": 5.0,
        "last": 8,
        "spread": 5.0,
        "target": 10.0,
        "scale": 0.01,
        "optimizer.lr": 1e-3,
        "sampling.prompts": 128,
    },
    "raft": ODE,
    "sft": ODE | {"sampling.group": 1},
    "distill": {"match": "mean_kl", "sampling.group": 1},
}

PUBLISHED |= dict.fromkeys(("handwriting", "words", "edit-words"), PUBLISHED["grpo"] | {"passes.minibatches": 1})


def value(config: TrainConfig, name: str) -> Any:
    """Return a field by its dotted name."""
    found: Any = config if hasattr(config, name.partition(".")[0]) else config.method
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_objective_has_a_recipe() -> None:
    """And every recipe an objective of the table."""
    assert {recipe().method.method_name for recipe in RECIPES.values()} == set(METHODS)
    assert set(PUBLISHED) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_other_models_are_the_published(name: str) -> None:
    """What is found on the built-in ones, which is quick, holds for them alone."""
    config, tuned = RECIPES[name](OTHER), RECIPES[name](HANDWRITING)
    assert config.model == OTHER
    assert {field: value(config, field) for field in PUBLISHED[name]} == PUBLISHED[name]
    assert config.train == PUBLISHED[name].get("train", "lora")
    assert config.lora.targets is None  # the model's own
    assert (config.data.order, config.optimizer.ema_interval, config.optimizer.ema_repeats) == ("epochs", 1, 1)
    assert replace(config, model=HANDWRITING) != tuned


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_as_toml_is_the_same_run(name: str) -> None:
    """What is left out of the file because it is not set has no value by default either."""
    config = RECIPES[name]()
    text = tomli_w.dumps(drop_unset(as_record(config)))
    assert read_record(tomllib.loads(text)) == config


@pytest.mark.parametrize("name", RECIPES)
def test_the_built_in_models_are_evaluated_on_hundreds_of_samples(name: str) -> None:
    """What bench/README.md says of them; a large model is looked at less."""
    assert RECIPES[name]().evaluation.final_samples == (500 if name == "ddpo" else 1000)
    assert RECIPES[name](OTHER).evaluation.final_samples < 100


@pytest.mark.parametrize("name", RECIPES)
def test_it_fits_the_model_that_it_is_made_for(name: str) -> None:
    """The built-in one that its sampler is for, by default."""
    config = RECIPES[name]()
    assert config.model == {"ddpo": UNET, "d3po": UNET, "words": "words", "edit-words": "edit-words"}.get(name, HANDWRITING)
    check_model(config, "epsilon" if config.model == UNET else "velocity")


@pytest.mark.parametrize(
    ("name", "model", "prediction"),
    [("dpo", UNET, "epsilon"), ("raft", UNET, "epsilon"), ("ddpo", UNET, "epsilon"), ("sft", UNET, "epsilon")],
)
def test_it_fits_the_other_built_in_model(name: str, model: str, prediction: Prediction) -> None:
    """Where the objective is defined for it."""
    check_model(RECIPES[name](model), prediction)


def test_supervised_runs_fit_pipelines_without_an_adapter() -> None:
    """Their levels are those of the schedule then; levels between its steps are refused."""
    config = RECIPES["sft"](OTHER)
    check_model(config, "velocity", recorded=True)
    between = with_values(config, {"noising.levels": ContinuousLevels()})
    with pytest.raises(UsageError, match=r"noising\.levels is 'continuous', expected auto, schedule or stratified"):
        check_model(between, "velocity", recorded=True)


@pytest.mark.parametrize("model", [HANDWRITING, UNET, OTHER])
@pytest.mark.parametrize("name", RECIPES)
def test_a_record_is_read_back(name: str, model: str) -> None:
    """Through JSON, and as the same run."""
    config = RECIPES[name](model)
    record = json.loads(json.dumps(as_record(config)))
    assert record["method"]["name"] == config.method.method_name
    assert read_record(record) == config


RUNS: list[TrainConfig] = [
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
            correction=CorrectionConfig("mask", "trajectory", 1.5),
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
            sampling=SamplingConfig(sampler=Ode("dpmpp_2m")),
            noising=NoisingConfig(3, LogitNormalLevels()),
        ),
    ),
    TrainConfig(Path("out"), method=Distill(teacher=Path("runs/teacher"))),
    TrainConfig(
        Path("out"),
        Grpo(),
        model="folder/of/one",
        prompts=("prompts.txt",),
        pipeline=PipelineConfig(heldout=("heldout.txt",), text_cache=Path("texts"), call=("system_prompt=", "n=3")),
    ),
    TrainConfig(Path("out"), method=Dpo(preferences=Path("pairs"), sampling=SamplingConfig(sampler=Ode()))),
]


@pytest.mark.parametrize("config", RUNS, ids=lambda config: config.method.method_name)
def test_nothing_is_lost_in_a_record(config: TrainConfig) -> None:
    """Paths, tuples, the objective's own fields; what was written is written again."""
    record = json.loads(json.dumps(as_record(config)))
    assert read_record(record) == config
    assert as_record(read_record(record)) == record


def test_a_group_of_settings_has_its_own_class() -> None:
    """The engine's own settings alone, of the class that it extends, lack a micro-batch."""
    for name, value in {"engine": EngineConfig(), "evaluation": SuiteConfig(), "data": ()}.items():
        with pytest.raises(TypeError, match=rf"{name} is a.* {type(value).__name__}, expected a \w+Config"):
            with_values(TrainConfig(Path("out"), Grpo()), {name: value})


def test_a_record_of_another_version() -> None:
    """A field that there is not is said, never passed over."""
    record = as_record(RECIPES["grpo"]())
    for changed, words in (
        ({**record, "novel": 1}, "unknown fields novel @ run"),
        ({**record, "rollout": {**record["rollout"], "novel": 1}}, "unknown fields novel @ run.rollout"),
        ({**record, "method": {**record["method"], "novel": 1}}, "unknown fields novel @ run.method"),
        ({**record, "method": {"name": "dppoo"}}, "method is 'dppoo', expected one of .*; did you mean 'dppo'"),
        ({**record, "method": {}}, "expected an object with the name of a method, one of grpo, .* @ run.method"),
        ({**record, "method": {"name": "nft", "trained": {"kind": "all"}}}, "unknown fields trained @ run.method"),
        ({**record, "updates": "3"}, "updates is a str, expected an integer"),
        (
            {**record, "method": {"name": "grpo", "kl": {"weight": "exat"}}},
            "kl.weight is 'exat', expected .*did you mean 'exact'",
        ),
        ({**record, "max_log_ratio": float("inf")}, "max_log_ratio is inf, expected a finite number"),
        ([], "run"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            read_record(changed)  # type: ignore[arg-type]
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_where_it_comes_from(name: str) -> None:
    """In its first line, which is all that a person sees before they choose."""
    about = inspect.getdoc(RECIPES[name])
    assert about is not None
    assert re.search(r"\(arXiv \d{4}\.\d{5}", about.splitlines()[0]), name


def test_help_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with that line."""
    assert cli.run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        about = inspect.getdoc(recipe)
        assert about is not None
        assert re.search(rf"^  {name} +{re.escape(about.splitlines()[0])}$", shown, re.MULTILINE), name


OWN: dict[str, tuple[str, str, Any]] = {
    "grpo": ("--clip-low", "0.2", 0.2),
    "dance": ("--trained.fraction", "0.5", 0.5),
    "cps": ("--form", "unscaled", "unscaled"),
    "guard": ("--clip", "0.3", 0.3),
    "dppo": ("--kl-threshold", "0.1", 0.1),
    "ddpo": ("--sampling.sampler.eta", "0.5", 0.5),
    "nft": ("--old.cap", "0.9", 0.9),
    "awm": ("--weighting", "t2", "t2"),
    "dpo": ("--preferences", "folder", Path("folder")),
    "dgpo": ("--old-samples-from", "7", 7),
    "crd": ("--match", "bce", "bce"),
    "tempflow": ("--scale", "2.0", 2.0),
    "d3po": ("--eps", "0.2", 0.2),
    "alignprop": ("--last", "3", 3),
    "raft": ("--best", "0.5", 0.5),
    "sft": ("--noising.each", "2", 2),
    "distill": ("--teacher", "folder", Path("folder")),
    "handwriting": ("--clip-high", "0.2", 0.2),
    "words": ("--evaluation.seeds", "3", 3),
    "edit-words": ("--optimizer.lr", "0.001", 0.001),
}


@pytest.mark.parametrize("name", RECIPES)
def test_its_fields_are_flags(name: str) -> None:
    """The command line knows those of the recipe's objective, and changes nothing else."""
    flag, text, expected = OWN[name]
    default = RECIPES[name]()
    config = parse_config(default, "fluvial", [flag, text])
    field = flag.removeprefix("--").replace("-", "_")
    assert value(config, field) == expected != value(default, field)
    assert changed(config, field, value(default, field)) == default


def changed(config: TrainConfig, name: str, new: Any) -> TrainConfig:
    """Return a run with a field changed, by its dotted name."""
    return with_values(config, {name: new})
