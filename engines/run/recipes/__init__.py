"""Recipes: functions that return the configuration of a run. Their table is recipes.toml.

Each has settings for large models, and others for the built-in models, which train in minutes on a CPU.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.table import method_type
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig, explain_fixed_micro_batch, with_values
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import DataConfig, MachineConfig, PipelineConfig
from fluvial.engines.run.method import Method
from fluvial.engines.run.record import as_record, read_record

HANDWRITING, UNET, WORDS, EDIT_WORDS = MODELS
OUT = Path("runs") / "x"

TABLE: dict[str, dict[str, Any]] = tomllib.loads(files(__package__).joinpath("recipes.toml").read_text(encoding="utf-8"))
SHARED = TABLE.pop("shared")
OF_RUN = {each.name for each in fields(TrainConfig)}


def _make_recipe(name: str, table: Mapping[str, Any]) -> Callable[..., TrainConfig]:
    """Return the recipe of an entry of the table."""

    def recipe(model: str = table.get("model", HANDWRITING)) -> TrainConfig:
        if model in MODELS:
            return _configure(model, "small", table["small"], table.get("on", {}).get(model, {}))
        if "published" not in table:
            return _configure(model, "large", table["large"])
        config = configure_published(table["published"], model)
        return _change(config, _as_record(table["large"])) if "large" in table else config

    recipe.__name__ = recipe.__qualname__ = name.replace("-", "_")
    recipe.__doc__ = table["help"]
    return recipe


def _configure(model: str, shared: str, *tables: Mapping[str, Any]) -> TrainConfig:
    """Return a run of a model with the settings of a shared table, overridden by those of others."""
    record: dict[str, Any] = {"out": str(OUT), "model": model}
    for each in (SHARED[shared], *tables):
        record = _merge(record, _as_record(each))
    return read_record(record)


def _as_record(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a table in the form of a run's record; they override those of its tables `like`."""
    record: dict[str, Any] = {}
    for name in table.get("like", ()):
        record = _merge(record, _as_record(SHARED[name]))
    for name, value in table.items():
        if name == "method":
            record = _merge(record, {"method": {"name": value}})
        elif name != "like":
            record = _merge(record, {name: value} if name in OF_RUN else {"method": {name: value}})
    return record


def _merge(record: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into nested settings; a value with a kind replaces the former one as a whole."""
    merged = dict(record)
    for name, value in changes.items():
        merges = isinstance(value, dict) and "kind" not in value and isinstance(record.get(name), dict)
        merged[name] = _merge(record[name], value) if merges else value
    return merged


def _change(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a run with changed settings; a new method keeps the settings that it shares with the former one."""
    record = as_record(config)
    if (name := changes.get("method", {}).get("name")) is not None:
        known = {each.name for each in fields(method_type(name))}  # type: ignore[arg-type]
        record["method"] = {field: value for field, value in record["method"].items() if field in known}
    return read_record(_merge(record, changes))


def configure_published(run: str, model: str) -> TrainConfig:
    """Return a run of a large model with the settings of a published run, by its name.

    LoRA targets, image size, length of prompts, dtypes and micro-batch are not those of the published run, and evaluations
    have the steps of the rollout. Prompts are your own, and rewards the job's. Prompts come in epochs, so that files of
    prompts may have weights. The moving average follows every update, so that even a short run's export differs from its
    starting weights.
    """
    config: TrainConfig = plugins.load("published", "extensions")(run)
    evaluation, fixed = config.evaluation, explain_fixed_micro_batch(config.method) is not None
    return replace(
        config,
        out=OUT,
        model=model,
        seed=0,
        updates=100 * config.updates_per_rollout,
        prompts=(),
        rewards=(),
        lora=replace(config.lora, targets=None),
        optimizer=replace(config.optimizer, ema_interval=1, ema_repeats=1),
        data=DataConfig(),
        engine=MachineConfig(micro_batch=config.engine.micro_batch if fixed else "auto"),
        pipeline=PipelineConfig(),
        evaluation=EvaluationConfig(
            every=evaluation.every, samples=evaluation.samples, final_samples=evaluation.final_samples
        ),
    )


def make_method_recipe(kind: type[Method]) -> Callable[..., TrainConfig]:
    """Return a recipe for a user-defined method, with its own defaults and those of the models."""

    def recipe(model: str = HANDWRITING) -> TrainConfig:
        method, plain = kind(), {"method": "grpo"}  # the defaults of another method stand in for it
        if model in MODELS:
            config = _configure(model, "small", plain, SHARED["one_update"])
        else:
            config = _configure(model, "large", plain)
            if explain_fixed_micro_batch(method) is not None:
                config = with_values(config, {"engine.micro_batch": 1})
        return replace(config, out=Path("runs") / kind.__name__.lower(), method=method)

    recipe.__doc__ = kind.__doc__
    return recipe


RECIPES = {name: _make_recipe(name, table) for name, table in TABLE.items()}
globals().update({recipe.__name__: recipe for recipe in RECIPES.values()})  # for `dir`, completion and pickle


def __getattr__(name: str) -> Callable[..., TrainConfig]:
    """Return the recipe of a name, with underscores in place of dashes."""
    if (spelled := name.replace("_", "-")) not in RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RECIPES[spelled]


# Groups per GPU and rollout, as in flow_grpo's own runs of 4 GPUs (sd3.5-medium/ocr-4gpu: 16 groups) and of one
# (wan2.1-t2v-1.3b/ocr: 4).
GROUPS = 4


def fit_to_gpus(config: TrainConfig, preset: str) -> tuple[TrainConfig, str]:
    """Return a run with at most `GROUPS` groups per GPU and an automatic micro-batch, and a line on the changes.

    Args:
        config: run as a recipe or a published run describes it.
        preset: number of GPUs, as in 1gpu or 8gpu.

    Raises:
        UsageError: the preset is invalid, or the run has no published rollout.
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
    line = f"--preset {preset}: {', '.join(changes) or 'nothing changes'}; a rollout has {groups * published.group} samples"
    if groups != published.prompts:
        line += f", published {published.batch}; every other setting stays"
    size = size if is_fixed else "auto"
    return with_values(config, {"sampling.prompts": groups, "engine.micro_batch": size}), line
