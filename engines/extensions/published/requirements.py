"""Requirements of a published run: GPUs, weights, rewards and prompts, and what does not come with fluvial."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fluvial.engines.extensions.published.runs import PublishedRun
from fluvial.models.catalogue import KNOWN
from fluvial.models.rewards.table import REWARD_MODELS

if TYPE_CHECKING:
    from fluvial.engines.data.prompt_sets import Part
    from fluvial.engines.run.config import TrainConfig

SERVER = "url="  # option of rewards computed by a server
PARTS: tuple[tuple["Part", str], ...] = (("train", "to train on"), ("heldout", "held out"))


def list_missing(run: PublishedRun) -> list[str]:
    """Return what `fluvial train NAME` needs from the user: flags, servers, adapters; empty if it starts as it is."""
    settings = {name: flags.value for name, flags in run.settings.items()}
    offline = any(name.startswith("preferences") for name in settings) or settings.get("method.name") == "dpo"
    prompts, rewards = settings.get("prompts", ()), settings.get("rewards", ())
    flags = ["--preferences"] if offline and not rewards and not prompts else []
    if not flags:
        flags += [] if prompts else ["--prompts"]
        flags += [] if rewards else ["--rewards"]
    flags += ["a reward server"] if any(SERVER in reward for reward in rewards) else []
    return flags + (["a model with an adapter"] if "model" in run.deviations else [])


def describe_accumulation(config: "TrainConfig", *, published: int, gpus: int) -> str:
    """Describe how an update keeps its number of samples on another number of GPUs.

    Args:
        config: configuration of the run.
        published: number of GPUs of the published run.
        gpus: number of GPUs here.
    """
    per_update = config.method.sampling.batch // config.method.passes.minibatches
    each = f"{per_update / gpus:g} per GPU"
    text = f"published on {published} GPUs, here {gpus}: an update keeps its {per_update} samples, {each}"
    if isinstance(config.engine.micro_batch, int):
        passes = math.ceil(per_update / gpus / config.engine.micro_batch)
        text += f", whose gradients are accumulated over {passes} micro-batches of up to {config.engine.micro_batch}"
    return text


def describe_requirements(run: PublishedRun, config: "TrainConfig", *, gpus: int) -> Iterator[str]:
    """Yield the requirements of a run on a number of GPUs, one per line."""
    from fluvial.engines.data.prompt_sets import is_set, read_set  # imports torch, which listing the runs does not need

    sampling = config.method.sampling
    yield f"{run.name}: {run.algorithm} on {run.model}"
    known = next((known for known in KNOWN if known.example == run.model), None)
    size = "" if known is None else f", {known.gibibytes:.0f} GiB in bfloat16 without text encoders and VAE"
    yield f"  model    {config.model}, from the Hub or --model FOLDER{size}"
    for reward in config.rewards:
        yield f"  reward   {reward}: {_describe_reward(reward)}"
    for word in config.prompts:
        parts = [f"{sum(1 for _ in read_set(word, part))} prompts {use}" for part, use in PARTS] if is_set(word) else []
        stands = f", for {published}" if (published := run.published.get("prompts")) else ""
        yield f"  prompts  {word}: {' and '.join(parts)}{stands}; --prompts FILE takes others"
    if config.makes_samples:
        samples = f"{sampling.prompts} groups of {sampling.group} samples"
        yield f"  rollout  {samples}, {sampling.steps} steps, {config.updates_per_rollout} updates"
    if config.makes_samples and run.gpus and gpus != run.gpus:
        yield f"  GPUs     {describe_accumulation(config, published=run.gpus, gpus=gpus)}"
    else:
        yield f"  GPUs     {gpus}, {'as published' if run.gpus else 'not stated by the source'}"
    missing = list_missing(run)
    yield f"  start    fluvial train {run.name}" + (f", with {', '.join(missing)} of your own" if missing else "")


def _describe_reward(text: str) -> str:
    """Return the source of a reward's weights and its requirements."""
    if SERVER in text:
        return "computed by a server, which you start"
    model = REWARD_MODELS.get(text.partition(":")[0])
    if model is None:
        return "of your own"
    facts = [f"{model.gibibytes:.2g} GiB, {model.weights}"] if model.parameters else ["nothing to download"]
    missing = model.list_missing_packages()
    return "; ".join([*facts, *([f"needs pip install '{model.install}'"] if missing else [])])
