"""The job of a model, built-in, of diffusers or user-defined, and its network."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fluvial.engines.data.images import read_images
from fluvial.engines.data.prompts import read_sources
from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.named_models import MODELS, brings_prompts
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.train.config import PipelineConfig, TrainConfig
from fluvial.engines.train.jobs.base import Job
from fluvial.engines.train.jobs.images import cache_folder, with_images
from fluvial.engines.train.jobs.pipeline import is_adapter, opened, pipeline
from fluvial.engines.train.jobs.weights import from_run, with_base
from fluvial.engines.train.jobs.words import words
from fluvial.models import DiffusionModel
from fluvial.models.device import default_device

__all__ = [
    "Job",
    "build",
    "fresh",
    "from_run",
    "handwriting",
    "named",
    "of_run",
    "opened",
    "pipeline",
    "to_sample",
    "to_train",
    "words",
]


def handwriting(
    *, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = (), unet: bool = False
) -> Job:
    """Return the built-in job: write 4-digit codes so that a recogniser reads them.

    Args:
        weights: folder of the model's weights; the shipped base by default.
        prompts: files of codes to train on, see `data.prompts.sources`; by default all codes that are not held out.
        data: images of codes with their codes as captions, see `data.images.read_images`.
        unet: train the UNet that predicts epsilon, not the transformer that predicts a velocity.
    """
    from fluvial.models import handwriting as built_in
    from fluvial.models.handwriting import codes, heldout_recogniser, likeness, reward_recogniser, write

    kind: Callable[[Path], Any] = built_in.HandwritingUNet if unet else built_in.Handwriting
    base = built_in.BASE_UNET if unet else built_in.BASE
    model = kind(base if weights is None else weights)
    recogniser, heldout = reward_recogniser(), codes("heldout")
    machine, neighbours = recogniser.each()
    train: Sequence[str | Prompt] = codes("train")
    weights_of = dict[str, float]()
    if prompts:
        train, weights_of = read_sources(prompts, check=model.check_prompt, heldout=heldout)
    elif data:
        train, weights_of = read_sources(data, check=model.check_prompt, heldout=heldout, read=read_images, field="data")
    return Job(
        model,
        train,
        {
            "characters": recogniser.characters,
            "machine": machine.characters,
            "neighbours": neighbours.characters,
            "likeness": likeness,
        },
        heldout=heldout,
        evaluators={"reward": recogniser.characters, "heldout": heldout_recogniser().characters},
        load=kind,
        data=lambda key, prompts: write(key, texts(prompts)),
        encode=lambda images: images * 2 - 1,
        source_weights=weights_of,
    )


def handwriting_unet(*, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = ()) -> Job:
    """Return `handwriting` with the UNet; the arguments are the same."""
    return handwriting(weights=weights, prompts=prompts, data=data, unet=True)


def named(model: str, *, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = ()) -> Job:
    """Return the job of a built-in model.

    Args:
        weights: folder of its weights; the shipped base by default.
        prompts: files of prompts to train on.
        data: images with captions.

    Raises:
        UsageError: there is no such model, or the file holds a line that is not a prompt.
    """
    if not brings_prompts(model):
        raise UsageError(
            "model", model, f"{' or '.join(MODELS)}, a folder, or an id on the Hub such as owner/name (fluvial models)"
        )
    job: Job = resolve_name(MODELS[model].job)(weights=weights, prompts=prompts, data=data)
    return job


def to_sample(
    name: str,
    settings: PipelineConfig,
    *,
    steps: int,
    guidance: Guidance,
    weights: Path | None = None,
    compute: torch.dtype = torch.float32,
) -> Job:
    """Return the job of a model that is only sampled from: without training prompts, unless they come with the model.

    Args:
        name: built-in model, folder or id on the Hub of a pipeline, or `module:name`.
        settings: size of the images, and how a pipeline is opened.
        steps: number of steps per sample.
        guidance: guidance of its steps.
        weights: folder of weights in place of the model's own.
        compute: dtype that the network computes in.

    Raises:
        UsageError: there is no such model, or the weights are of another.
    """
    if brings_prompts(name):
        _check_unset(name, settings)
        return named(name, weights=weights)
    from fluvial.models.rewards.jpeg import jpeg_compressibility

    job = opened(name, settings, steps=steps, guidance=guidance, compute=compute)
    model: Any = job.model
    load = None if is_adapter(name) else model.with_weights
    return with_base(replace(job, rewards={"jpeg": jpeg_compressibility}, load=load), weights)


def to_train(
    name: str,
    settings: PipelineConfig,
    *,
    steps: int,
    guidance: Guidance,
    weights: Path | None = None,
    compute: torch.dtype = torch.float32,
    prompts: Sequence[str] = (),
    data: Sequence[str] = (),
    preferences: Path | None = None,
) -> Job:
    """Return the job of training a model, with its prompts; the arguments are those of `to_sample` and `pipeline`.

    Raises:
        UsageError: there is no such model, or no prompts.
    """
    if brings_prompts(name) or not ("/" in name or Path(name).is_dir() or is_adapter(name)):
        _check_unset(name, settings)
        return named(name, weights=weights, prompts=prompts, data=data)
    job = pipeline(
        name, settings, prompts=prompts, data=data, preferences=preferences, steps=steps, guidance=guidance, compute=compute
    )
    return with_base(job, weights)


def _check_unset(name: str, settings: PipelineConfig) -> None:
    """Raise UsageError for settings of a pipeline, which a built-in model does not take."""
    for field in fields(settings):
        if getattr(settings, field.name) != field.default:
            raise no_effect(f"pipeline.{field.name}", f"with model {name}")


def fresh(model: str, seed: int) -> DiffusionModel:
    """Return a built-in model with random weights."""
    made: DiffusionModel = resolve_name(MODELS[model].model)(None, seed=seed)
    return made


def of_run(config: TrainConfig) -> Job:
    """Return the job that a run's configuration describes: a built-in model's, or a pipeline's.

    Raises:
        UsageError: there is no such model, or it cannot be trained as configured.
    """
    config = from_run(config)
    asked, preferences = config.pipeline, config.objective.traits.preferences
    if not brings_prompts(config.model) and (config.data or preferences is not None) and asked.text_cache is None:
        asked = replace(asked, text_cache=cache_folder(config) / "texts")  # captions, like images, are encoded once
    job = to_train(
        config.model,
        asked,
        steps=config.rollout.steps,
        guidance=config.rollout.guidance,
        weights=config.weights,
        compute=config.engine.compute_dtype(default_device()),
        prompts=config.prompts,
        data=config.data,
        preferences=preferences,
    )
    return with_images(job, config)


def build(job: Job, *, empty: bool = False) -> nn.Module:
    """Return a job's network with its weights on the CPU, or, if `empty`, with parameters on the meta device.

    Raises:
        UsageError: the weights are missing, damaged or of another model.
    """
    try:
        return job.model.build(empty=empty)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the model cannot be loaded: {reason}") from error
