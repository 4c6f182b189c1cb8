"""Published runs as configurations of fluvial, side by side with what was published, and what they require."""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from fluvial.engines.data.prompt_sets import Part, is_set, records
from fluvial.engines.extensions.published.runs import Citation, PublishedRun, always, as_flag, find
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.log.records import flat
from fluvial.engines.run.record import as_record, read_record
from fluvial.models.catalogue import KNOWN
from fluvial.models.rewards.table import REWARD_MODELS

ASSUMED = "assumed"  # of a setting that no source states


class ComparedSetting(NamedTuple):
    """A setting as published and as fluvial runs it."""

    setting: str
    published: str
    ours: str
    why: str  # empty where the two are the same
    source: Citation | None


def resolve(run: PublishedRun) -> TrainConfig:
    """Return the configuration of a published run; `run.deviations` says in what it differs from what was published."""
    return read_record({"out": f"runs/{run.name}", **run.overlay()})


def configure(name: str) -> TrainConfig:
    """Return the configuration of the published run of a name, see `find` and `resolve`; recipes begin with it."""
    return resolve(find(name))


def side_by_side(run: PublishedRun) -> Iterator[ComparedSetting]:
    """Yield each setting of the configuration, and what a source states besides, in the order of a config.json.

    A setting that no source states is assumed, whatever its value.
    """
    ours = {as_flag(name): value for name, value in flat(as_record(resolve(run))).items()}
    stated = {name for name, found in run.settings.items() if found.source is not None}
    stated |= {*run.published, *run.deviations}
    for name in dict.fromkeys([*_with_tables(ours), *run.settings, *run.published, *run.deviations]):
        value = next(
            (format_value(values[name]) for values in (ours, run.fixed, always()) if name in values), ""
        )  # none of a table
        if name in stated:
            yield _format_setting(run, name, value)
        elif name in ours:
            yield ComparedSetting(name, "not stated", value, ASSUMED, None)


def format_value(value: Any) -> str:
    """Return a value as it is printed."""
    if isinstance(value, list | tuple):
        return " ".join(map(format_value, value)) or "none"
    return value if isinstance(value, str) and value.strip() else json.dumps(value)


def _format_setting(run: PublishedRun, name: str, ours: str) -> ComparedSetting:
    """Return the row of a setting that a source states, or that differs."""
    found, deviation = run.settings.get(name), run.deviations.get(name)
    source = None if found is None else found.source
    published = run.published.get(name, "not stated" if source is None or found is None else found.value)
    if deviation is None:
        return ComparedSetting(name, format_value(published), ours, "", source)
    published = published if deviation.published is None else deviation.published
    ours = ours if deviation.ours is None else format_value(deviation.ours)
    return ComparedSetting(name, format_value(published), ours, f"[{deviation.kind}] {deviation.why}", source)


def _with_tables(names: Iterable[str]) -> Iterator[str]:
    """Yield dotted names, each with the tables that it stands in before it."""
    for name in names:
        yield from accumulate(name.split("."), "{}.{}".format)


SERVER = "url="  # option of the rewards that ask a server
PARTS: tuple[tuple[Part, str], ...] = (("train", "to train on"), ("heldout", "held out"))


def to_bring(run: PublishedRun) -> list[str]:
    """Return what `fluvial train NAME` lacks: flags that name it, and servers; empty if it starts as it is."""
    settings = {name: found.value for name, found in run.settings.items()}
    offline = any(name.startswith("preferences") for name in settings) or settings.get("method.name") == "dpo"
    prompts, rewards = settings.get("prompts", ()), settings.get("rewards", ())
    found = ["--preferences"] if offline and not rewards and not prompts else []
    if not found:
        found += [] if prompts else ["--prompts"]
        found += [] if rewards else ["--rewards"]
    found += ["a reward server"] if any(SERVER in reward for reward in rewards) else []
    return found + (["a model with an adapter"] if "model" in run.deviations else [])


def choose_accumulation(config: TrainConfig, *, published: int, gpus: int) -> str:
    """Return how an update keeps its samples on another number of GPUs.

    Args:
        published: number of GPUs of the published run.
        gpus: number of GPUs here.
    """
    per_update = config.method.sampling.batch // config.method.passes.minibatches
    each = f"{per_update / gpus:g} per GPU"
    said = f"published on {published} GPUs, here {gpus}: an update keeps its {per_update} samples, {each}"
    if isinstance(config.engine.micro_batch, int):
        passes = math.ceil(per_update / gpus / config.engine.micro_batch)
        said += f", whose gradients are accumulated over {passes} micro-batches of up to {config.engine.micro_batch}"
    return said


def lines(run: PublishedRun, config: TrainConfig, *, gpus: int) -> Iterator[str]:
    """Yield what a run takes on a number of GPUs, a fact per line."""
    sampling = config.method.sampling
    yield f"{run.name}: {run.algorithm} on {run.model}"
    known = next((known for known in KNOWN if known.example == run.model), None)
    size = "" if known is None else f", {known.gibibytes:.0f} GiB in bfloat16 without text encoders and VAE"
    yield f"  model    {config.model}, from the Hub or --model FOLDER{size}"
    for reward in config.rewards:
        yield f"  reward   {reward}: {_reward(reward)}"
    for word in config.prompts:
        parts = [f"{sum(1 for _ in records(word, part))} prompts {said}" for part, said in PARTS] if is_set(word) else []
        stands = f", for {published}" if (published := run.published.get("prompts")) else ""
        yield f"  prompts  {word}: {' and '.join(parts)}{stands}; --prompts FILE takes others"
    if config.makes_samples:
        samples = f"{sampling.prompts} groups of {sampling.group} samples"
        yield f"  rollout  {samples}, {sampling.steps} steps, {config.updates_per_rollout} updates"
    if config.makes_samples and run.gpus and gpus != run.gpus:
        yield f"  GPUs     {choose_accumulation(config, published=run.gpus, gpus=gpus)}"
    else:
        yield f"  GPUs     {gpus}, {'as published' if run.gpus else 'the source states none'}"
    missing = to_bring(run)
    yield f"  start    fluvial train {run.name}" + (f", with {', '.join(missing)} of your own" if missing else "")


def _reward(text: str) -> str:
    """Return where a reward's weights come from, and what it needs."""
    if SERVER in text:
        return "asks a server, which you start"
    model = REWARD_MODELS.get(text.partition(":")[0])
    if model is None:
        return "of your own"
    facts = [f"{model.gibibytes:.2g} GiB, {model.weights}"] if model.parameters else ["nothing to download"]
    missing = model.missing()
    return "; ".join([*facts, *([f"needs pip install '{model.install}'"] if missing else [])])
