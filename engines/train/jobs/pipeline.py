"""Jobs of diffusers' pipelines, and of a user-defined model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fluvial.engines.data.images import read_images
from fluvial.engines.data.preferences import preference_records
from fluvial.engines.data.prompts import read_heldout, read_sources, split_off, with_recorded_sizes
from fluvial.engines.data.records import Prompt, negatives, texts
from fluvial.engines.data.sizes import Size, shapes_of
from fluvial.engines.errors import RunError, UsageError, no_effect
from fluvial.engines.fsdp.world import World
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.train.config import PipelineConfig
from fluvial.engines.train.jobs.base import Job, has_one_size, only_shape
from fluvial.models import is_recorded
from fluvial.models.device import default_device, is_accelerator


def pipeline(
    name: str,
    config: PipelineConfig,
    *,
    prompts: Sequence[str] = (),
    preferences: Path | None = None,
    data: Sequence[str] = (),
    steps: int,
    guidance: Guidance,
    compute: torch.dtype,
) -> Job:
    """Return the job of training a diffusers pipeline, or a user-defined model, on prompts from a file.

    Args:
        name: folder of the pipeline, its id on the Hub, or `module:name` of an own model (`models.load_adapter`).
        config: size of the images, and how the pipeline is opened.
        prompts: files of prompts to train on, see `data.prompts.sources`.
        preferences: folder of preferences, whose prompts are the job's where there is no such file.
        data: images with captions, which are the prompts then, see `data.images.read_images`.
        steps: steps per sample, of a pipeline without an adapter.
        guidance: guidance of its steps.
        compute: dtype that its network computes in.

    Raises:
        UsageError: there are no prompts, the pipeline cannot be opened or trained, or it makes no images of that size.
    """
    from fluvial.models.rewards.jpeg import jpeg_compressibility

    if not prompts and not data and preferences is None:
        raise UsageError(
            f"model {name} needs prompts to train on: set `prompts` to a file, .txt with one prompt per line, "
            ".jsonl, .csv or .parquet with a column prompt; for sft, set `data` to a folder of images with "
            "captions"
        )
    job = opened(name, config, steps=steps, guidance=guidance, compute=compute)
    model: Any = job.model
    train, heldout, weights = read_prompts_of(
        config, prompts=prompts, preferences=preferences, data=data, check=model.check_prompt
    )
    if job.sizes and prompts:
        train = with_recorded_sizes(train, list(job.sizes))
    job = replace(job, prompts=train, heldout=heldout, rewards={"jpeg": jpeg_compressibility}, source_weights=weights)
    if is_adapter(name):
        return job

    def prepare(world: World, negative: Sequence[str]) -> None:
        if config.text_cache is not None:
            own = [text for text in negatives([*train, *heldout], "") if text]
            everything = list(dict.fromkeys([*texts([*train, *heldout]), *own, *negative]))
            with world.agreed():  # until every rank has written its prompts
                try:
                    for prompt in everything[world.rank :: world.size]:
                        model.encode([prompt])
                except ValueError as error:
                    raise UsageError(f"model {name}: {error}") from error
                except OSError as error:
                    raise RunError(f"{error}; what is encoded is kept, start again to go on") from error
            model.release()

    def check(module: nn.Module) -> str:
        error = model.check(module, texts((train * 2)[:2]))
        return f"no adapter for {model.pipeline}: replayed as it was recorded, its velocities within {error:.1g}"

    return replace(job, load=model.with_weights, prepare=prepare, check=check if is_recorded(model) else None)


class PromptsOfRun(NamedTuple):
    """The prompts of a run."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    weights: dict[str, float]  # of each file of training prompts by its name


def read_prompts_of(
    config: PipelineConfig,
    *,
    prompts: Sequence[str],
    preferences: Path | None,
    data: Sequence[str],
    check: Callable[[str], None],
) -> PromptsOfRun:
    """Return the prompts that a run trains on, and those that it holds out.

    Args:
        config, prompts, preferences, data: arguments of `pipeline`.
        check: function that raises ValueError for a string that is not a prompt of the model.
    """
    heldout = read_heldout(config.heldout, prompts or data, check=check)
    apart = texts(heldout)
    train: tuple[Prompt, ...]
    weights: dict[str, float] = {}
    if prompts or data:
        train, weights = read_training(prompts, data, check=check, heldout=apart)
    else:
        assert preferences is not None
        records = preference_records(preferences, check=check, heldout=apart)
        train = tuple(dict.fromkeys(record.prompt for record in records))
    if not heldout:
        train, heldout = split_off(train)
    return PromptsOfRun(train, heldout, weights)


def read_training(
    prompts: Sequence[str], data: Sequence[str], *, check: Callable[[str], None], heldout: Sequence[str]
) -> tuple[tuple[Prompt, ...], dict[str, float]]:
    """Return the prompts of files, else the captions of images, and the weight of each source by its name."""
    if prompts:
        return read_sources(prompts, check=check, heldout=heldout)
    return read_sources(data, check=check, heldout=heldout, read=read_images, field="data")


def opened(
    name: str, config: PipelineConfig, *, steps: int, guidance: Guidance, compute: torch.dtype = torch.float32
) -> Job:
    """Return the job of a pipeline without prompts, rewards and evaluators.

    Args:
        name, config, steps, guidance, compute: arguments of `pipeline`.

    Raises:
        UsageError: the pipeline cannot be opened, or makes no images of that size.
    """
    if is_adapter(name):
        return _adapted(name, config)
    from fluvial.models.pipelines.folder import local_folder
    from fluvial.models.pipelines.open import has_adapter, open_model
    from fluvial.models.replay.any_pipeline import AnyPipeline

    half = config.frozen == "bfloat16" or (config.frozen == "auto" and is_accelerator(default_device()))
    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "cache": config.text_cache, "trust_remote_code": config.trust_remote_code}
    if config.text_tokens is not None:
        options["text_tokens"] = config.text_tokens
    size: dict[str, Any] = {**config.size._asdict(), "frames": config.frames}
    try:
        folder = local_folder(name, trust_remote_code=config.trust_remote_code)
        model: Any
        if not has_adapter(folder):
            if config.shift is not None:
                raise no_effect("pipeline.shift", "without an adapter, because the pipeline makes its own schedule")
            if config.sizes:
                raise UsageError(
                    "`pipeline.sizes` is set, and the pipeline has no adapter, so that it has one size: use height"
                )
            options |= {"steps": steps, "scale": guidance.scale, "negative": guidance.negative, "compute": compute}
            model = AnyPipeline(folder, **size, call=dict(map(_named_value, config.call)), **options)
        elif config.call:
            raise no_effect("pipeline.call", "with an adapter, which calls no pipeline")
        else:
            if config.shift is not None:
                options["shift"] = config.shift
            model = open_model(folder, **options)
        shape, sizes = model.latent_shape(**size), _sizes(model, config)
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error
    return Job(model, (), heldout=(), shape=shape, sizes=sizes)


def _sizes(model: Any, config: PipelineConfig) -> dict[Size, tuple[int, ...]]:
    """Return the shape of a sample of each size; ValueError if the model has no such size."""
    return shapes_of(config.sizes, lambda height, width: model.latent_shape(height, width, config.frames))


def is_adapter(name: str) -> bool:
    """Return whether a model's name is `module:name`."""
    return ":" in name and not Path(name).is_dir()


def _adapted(name: str, config: PipelineConfig) -> Job:
    """Return the job of a user-defined model, without prompts, rewards and evaluators."""
    from fluvial.models import load_adapter

    size: dict[str, Any] = {**config.size._asdict(), "frames": config.frames}
    sized = PipelineConfig(config.height, config.width, config.sizes, config.frames)
    try:
        if config != replace(sized, heldout=config.heldout):
            raise ValueError(
                "a model of your own takes only height, width, sizes, frames and heldout of pipeline: leave the rest"
            )
        model = load_adapter(name)
        # A model of one size says so by defaults, and then need not be told.
        shape = only_shape(model) if sized == PipelineConfig() and has_one_size(model) else model.latent_shape(**size)
        sizes = _sizes(model, config)
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error
    return Job(model, (), heldout=(), shape=shape, sizes=sizes)


def _named_value(word: str) -> tuple[str, Any]:
    """Return the name and the value of name=value; the value is JSON, or else text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
