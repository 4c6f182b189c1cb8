"""Jobs of diffusers pipelines and user-defined models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fluvial.engines.data.images import read_images
from fluvial.engines.data.preferences import read_preference_records
from fluvial.engines.data.prompts import hold_out, read_heldout, read_prompts, read_sources
from fluvial.engines.data.records import Prompt, model_inputs, texts
from fluvial.engines.data.sizes import parse_shapes
from fluvial.engines.engine.config import DTYPES
from fluvial.engines.errors import UsageError, convert_errors, no_effect
from fluvial.engines.run.jobs.base import Job, find_only_shape, has_one_size
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.device import find_default_device, has_values, is_accelerator


class RunPrompts(NamedTuple):
    """Prompts of a run."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    weights: dict[str, float]  # weight of each file of training prompts, by its name


def read_run_prompts(
    config: PipelineConfig,
    *,
    prompts: Sequence[str],
    preferences: Path | None,
    data: Sequence[str],
    check: Callable[[str], None],
    media: Mapping[str, str] = MappingProxyType({}),
) -> RunPrompts:
    """Read the prompts that a run trains on, and the held-out ones.

    Args:
        config, prompts, preferences, data: settings and arguments of `job.open_to_train`.
        check: raises ValueError for a string that is not a prompt of the model.
        media: column of each argument of the pipeline's call that is an image.
    """
    heldout: Sequence[Prompt] = read_heldout(config.heldout, prompts or data, check=check, media=media)
    heldout_inputs = model_inputs(heldout)
    train: Sequence[Prompt]
    weights: dict[str, float] = {}
    if prompts or data:
        train, weights = read_training(prompts, data, check=check, heldout=heldout_inputs, media=media)
    else:
        assert preferences is not None
        records = read_preference_records(preferences, check=check, heldout=texts(heldout))
        train = tuple(dict.fromkeys(record.prompt for record in records))
    if not heldout:
        train, heldout = hold_out(train, prompts, check=check, media=media)
    return RunPrompts(train, heldout, weights)


def read_training(
    prompts: Sequence[str],
    data: Sequence[str],
    *,
    check: Callable[[str], None],
    heldout: Collection[object],
    media: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Sequence[Prompt], dict[str, float]]:
    """Read prompts from files, or else captions of images; return them and the weight of each source by name."""
    if prompts:
        return read_sources(prompts, check=check, heldout=heldout, read=partial(read_prompts, media=media))
    return read_sources(data, check=check, heldout=heldout, read=read_images, field="data")


def open_job(
    name: str,
    config: PipelineConfig,
    *,
    steps: int,
    guidance: Guidance,
    compute: torch.dtype = torch.float32,
    prompts: Callable[[Any], tuple[Any, RunPrompts]] | None = None,
) -> Job:
    """Open the job of a pipeline without rewards and evaluators.

    Args:
        name, config, steps, guidance, compute: see `job.open_to_sample`.
        prompts: function from the model to the adapted model and the prompts of the run; None for a job without prompts.

    Raises:
        UsageError: the pipeline cannot be opened, or does not support the size.
    """
    prompts_of = RunPrompts((), (), {})
    model = open_named(name, config, steps=steps, guidance=guidance, compute=compute)
    try:
        if prompts is not None:
            model, prompts_of = prompts(model)
        shape = _find_shape(model, config, adapted=is_adapter(name))
        sizes = parse_shapes(config.sizes, lambda height, width: model.latent_shape(height, width, config.frames))
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error
    return Job(
        model, prompts_of.train, heldout=prompts_of.heldout, shape=shape, sizes=sizes, source_weights=prompts_of.weights
    )


def open_named(
    name: str, config: PipelineConfig, *, steps: int, guidance: Guidance, compute: torch.dtype = torch.float32
) -> Any:
    """Open the model of a name: a pipeline's folder or Hub id, or a user-defined model; see `open_job`."""
    try:
        if is_adapter(name):
            return _open_custom(name, config)
        return _open_diffusers(name, config, steps=steps, guidance=guidance, compute=compute)
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error


def _find_shape(model: Any, config: PipelineConfig, *, adapted: bool) -> tuple[int, ...]:
    """Return the shape of a sample; a user-defined model of one size needs no size settings."""
    if adapted and replace(config, heldout=()) == PipelineConfig() and has_one_size(model):
        return find_only_shape(model)
    shape: tuple[int, ...] = model.latent_shape(**config.size._asdict(), frames=config.frames)
    return shape


def _open_diffusers(name: str, config: PipelineConfig, *, steps: int, guidance: Guidance, compute: torch.dtype) -> Any:
    """Open the model of a diffusers pipeline, by its adapter or as a recorded pipeline."""
    from fluvial.models.modular.any_modular import AnyModular
    from fluvial.models.original.whole import find_pipeline_folder
    from fluvial.models.pipelines.base import VaeOptions
    from fluvial.models.pipelines.folder import is_modular
    from fluvial.models.pipelines.open import has_adapter, list_call_options, open_model
    from fluvial.models.replay.any_pipeline import AnyPipeline
    from fluvial.models.replay.arguments import parse_argument

    half = config.frozen == "bfloat16" or (config.frozen == "auto" and is_accelerator(find_default_device()))
    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "cache": config.text_cache, "trust_remote_code": config.trust_remote_code}
    if config.text_tokens is not None:
        options["text_tokens"] = config.text_tokens
    folder = find_pipeline_folder(name, trust_remote_code=config.trust_remote_code, settings=config.settings)
    if has_adapter(folder):
        call, known = dict(map(parse_argument, config.call)), list_call_options(folder)
        if not call.keys() <= {*known} - {"height", "width", "frames"}:
            raise no_effect("pipeline.call", "with an adapter, which calls no pipeline")
        if wrong := [f"{name}={value}" for name, value in call.items() if not isinstance(value, int | float | None)]:
            raise UsageError(f"`pipeline.call` holds {wrong[0]}, expected a number, true or false")
        options |= call
        if "height" in known:  # a pipeline with images
            sized = {**config.size._asdict(), "frames": config.frames}
            options |= {name: count for name, count in sized.items() if name in known}
        elif config.media:
            raise no_effect("pipeline.media", "with an adapter, which takes text only")
        if config.shift is not None:
            options["shift"] = config.shift
        if config.text_base != "auto":
            options["text_base"] = config.text_base
        vae = VaeOptions(DTYPES.get(config.vae_dtype), config.vae_tile, config.vae_offload)
        if vae != VaeOptions():
            options["vae"] = vae
        return open_model(folder, **options)
    if not has_values(find_default_device()):
        options["device"] = "cpu"  # recording needs values, which a simulated GPU lacks
    for name in ("text_base", "vae_dtype", "vae_tile", "vae_offload"):
        if getattr(config, name) != getattr(PipelineConfig, name):
            raise no_effect(f"pipeline.{name}", "without an adapter, because the pipeline runs its own parts")
    if config.shift is not None:
        raise no_effect("pipeline.shift", "without an adapter, because the pipeline makes its own schedule")
    if config.sizes:
        raise no_effect("pipeline.sizes", "without an adapter, because the pipeline then has one size (height and width)")
    if config.frozen == "auto" and compute.itemsize == 2:  # most pipelines do not mix dtypes
        options["dtype"] = compute
    options |= {"steps": steps, "scale": guidance.scale, "negative": guidance.negative, "compute": compute}
    size = {**config.size._asdict(), "frames": config.frames}
    kind = AnyModular if is_modular(folder) else AnyPipeline
    return kind(folder, **size, call=dict(map(parse_argument, config.call)), **options)


def check_second_scale(model: Any, *, guided: bool) -> None:
    """Raise UsageError if a model with an adapter has a second guidance scale, and the run has no guidance."""
    if not guided and getattr(model, "guidance_scale_2", None) is not None:
        raise no_effect("pipeline.call", "with guidance_scale_2, without guidance (a scale of 1)")


def check_exists(name: str) -> None:
    """Raise UsageError unless a model is a folder, `module:name`, or a pipeline on the Hub or in its cache."""
    from fluvial.models.pipelines.folder import check_known

    if not is_adapter(name):
        with convert_errors(UsageError, ValueError, says=f"model {name}"):
            check_known(name)


def is_adapter(name: str) -> bool:
    """Return whether a model's name is `module:name`."""
    return ":" in name and not Path(name).is_dir()


def _open_custom(name: str, config: PipelineConfig) -> Any:
    """Open a user-defined model."""
    from fluvial.models import load_adapter

    sized = PipelineConfig(config.height, config.width, config.sizes, config.frames)
    if config != replace(sized, heldout=config.heldout):
        raise ValueError(
            "a model of your own has only height, width, sizes, frames and heldout of pipeline: remove the other settings"
        )
    return load_adapter(name)
