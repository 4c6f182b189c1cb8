"""Published runs as configurations of fluvial, side by side with what was published."""

import json
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.config import UNUSED
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.published.runs import PublishedRun, Source, always, flat
from fluvial.engines.train.record import as_record, recorded

# Settings that change every update, by table; a run whose source does not state one says so.
UPDATE = {
    "rollout": ("prompts", "steps", "guidance.scale"),
    "optimizer": ("name", "lr", "betas", "eps", "weight_decay", "schedule", "warmup", "max_grad_norm", "ema_decay"),
}
SAMPLES = {"rollout": ("group", "sampler")}  # of a run that makes samples
STEPS = {"rollout": ("window", "trained", "shared_noise")}  # of a loss of recorded steps
ADVANTAGES = {"advantage": ("scale", "eps", "clip", "ddof", "drop_zero")}
LORA = {"lora": ("rank", "alpha", "targets", "form.kind", "form.init")}


class Row(NamedTuple):
    """A setting as published and as fluvial runs it."""

    setting: str
    published: str
    ours: str
    why: str  # empty where the two are the same
    source: Source | None


def resolve(run: PublishedRun) -> TrainConfig:
    """Return the configuration of a published run; `run.deviations` says in what it differs from what was published.

    Raises:
        UsageError: fluvial has no objective for the run's algorithm.
    """
    if run.needs:
        raise UsageError(
            f"{run.name} is a run of {run.algorithm}, and fluvial has no such objective, which needs {run.needs}: its "
            f"settings are listed by fluvial runs {run.name}"
        )
    return recorded({"out": f"runs/{run.name}", **run.overlay()})


def side_by_side(run: PublishedRun) -> Iterator[Row]:
    """Yield each setting that a source states, that changes the update, or that differs, in the order of a config.json."""
    config = None if run.needs else resolve(run)
    ours = {} if config is None else flat(as_record(config))
    watched = () if config is None else _watched(config)
    stated = {name for name, found in run.settings.items() if found.source is not None}
    stated |= {*run.published, *run.deviations}
    for name in dict.fromkeys([*_with_tables(ours), *run.settings, *run.published, *run.deviations]):
        value = ours.get(name, always().get(name, ""))
        if name in stated:
            yield _stated(run, name, value)
        elif name in ours and any(f"{name}.".startswith(f"{prefix}.") for prefix in watched):
            yield Row(name, "not stated", shown(value), "assumed", None)


def shown(value: Any) -> str:
    """Return a value as it is printed."""
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _stated(run: PublishedRun, name: str, ours: Any) -> Row:
    """Return the row of a setting that a source states, or that differs."""
    found, deviation = run.settings.get(name), run.deviations.get(name)
    source = None if found is None else found.source
    published = run.published.get(name, "not stated" if source is None or found is None else found.value)
    if deviation is None:
        return Row(name, shown(published), shown(ours), "", source)
    published = published if deviation.published is None else deviation.published
    ours = ours if deviation.ours is None else deviation.ours
    return Row(name, shown(published), shown(ours), f"[{deviation.kind}] {deviation.why}", source)


def _with_tables(names: Iterable[str]) -> Iterator[str]:
    """Yield dotted names, each with the tables that it stands in before it."""
    for name in names:
        yield from accumulate(name.split("."), "{}.{}".format)


def _watched(config: TrainConfig) -> list[str]:
    """Return the settings, and tables of settings, that change the update of a run."""
    traits = config.objective.traits
    on_steps = traits.trains_on == "steps"
    tables: list[dict[str, Any]] = [
        UPDATE,
        *([SAMPLES] if config.makes_samples else []),
        *([STEPS] if on_steps else []),
        *([ADVANTAGES] if traits.rewards == "advantages" else []),
        *([LORA] if config.train == "lora" else []),
    ]
    unused = {f"optimizer.{name}" for name in UNUSED[config.optimizer.name]}
    names = [f"{table}.{name}" for parts in tables for table, fields in parts.items() for name in fields]
    return [
        *(name for name in names if name not in unused),
        *("seed", "train", "minibatches", "epochs", "objective"),
        *(["rewards"] if config.makes_samples else []),
        *([] if on_steps else ["noising"]),
        *(["kl.coef"] if traits.takes_kl else []),
    ]
