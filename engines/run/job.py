"""Jobs of models (built-in, diffusers pipelines, or user-defined), and their networks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fluvial.core.random import Key
from fluvial.engines.choices import is_set
from fluvial.engines.data.prompt_table import list_examples
from fluvial.engines.data.prompts import assign_recorded_sizes
from fluvial.engines.data.records import Prompt, model_inputs, texts
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError, convert_errors, no_effect
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.run.jobs.images import locate_cache, with_images
from fluvial.engines.run.jobs.media import check_columns, list_media_columns
from fluvial.engines.run.jobs.pipeline import (
    RunPrompts,
    check_exists,
    check_second_scale,
    is_adapter,
    open_job,
    read_run_prompts,
    read_training,
)
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import OtherWeights, from_run, with_base
from fluvial.engines.run.method import Preferences
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.waits import count_parts
from fluvial.models import is_recorded
from fluvial.models.device import find_default_device
from fluvial.models.lora import find_lora_layers

__all__ = [
    "Job",
    "build",
    "build_job",
    "edit_words",
    "from_run",
    "handwriting",
    "open_configured",
    "open_to_sample",
    "open_to_train",
    "words",
]


def handwriting(*, unet: bool = False) -> Job:
    """Return the built-in job: write 4-digit codes so that a recogniser reads them.

    Args:
        unet: train the UNet that predicts epsilon instead of the transformer that predicts a velocity.
    """
    from fluvial.models import handwriting as built_in
    from fluvial.models.handwriting import draw_codes, likeness, list_codes, load_heldout_recogniser, load_reward_recogniser

    kind: Callable[[Path], Any] = built_in.HandwritingUNet if unet else built_in.Handwriting
    base = built_in.BASE_UNET if unet else built_in.BASE
    recogniser = load_reward_recogniser()
    machine, neighbours = recogniser.split()
    rewards: dict[str, Reward] = {
        "characters": recogniser.characters,
        "machine": machine.characters,
        "neighbours": neighbours.characters,
        "likeness": likeness,
    }
    evaluators = {"reward": recogniser.characters, "heldout": load_heldout_recogniser().characters}
    return _make_built_in(kind, base, list_codes, draw_codes, rewards, evaluators)


handwriting_unet = partial(handwriting, unet=True)


def words() -> Job:
    """Return the built-in job: draw words of 3 to 6 letters so that RapidOCR reads them; ddddocr evaluates held-out words.

    Raises:
        UsageError: a package of the recognisers is not installed.
    """
    from fluvial.models import words as built_in

    return _make_built_in(built_in.Words, built_in.BASE, built_in.list_words, built_in.draw_words, *_read_by_ocr("words"))


def edit_words() -> Job:
    """Return the built-in job: correct a wrong letter in the image of a word, and keep the others; RapidOCR reads it.

    Files of prompts need a column `image`.

    Raises:
        UsageError: a package of the recognisers is not installed.
    """
    from fluvial.models import words as built_in

    def list_known(split: Literal["train", "heldout"]) -> list[Prompt]:
        images = built_in.draw_misspelt_words(split)
        return [Prompt(word, media={"image": image}) for word, image in images.items()]

    def write(key: Key, prompts: Sequence[Any]) -> Tensor:
        return built_in.draw_corrections(prompts)

    rewards, evaluators = _read_by_ocr("edit-words")
    rewards["unchanged"] = built_in.unchanged
    evaluators = {"unchanged": built_in.unchanged, **evaluators}
    return _make_built_in(built_in.EditWords, built_in.EDIT_BASE, list_known, write, rewards, evaluators)


def _read_by_ocr(name: str) -> tuple[dict[str, Reward], dict[str, Reward]]:
    """Return the rewards and evaluators of a job of words; UsageError if a package of the recognisers is not installed."""
    from fluvial.models import words as built_in
    from fluvial.models.words.recognisers import INSTALL, list_missing_packages

    if absent := list_missing_packages():
        raise UsageError(f"the {name} job needs {', '.join(absent)}, not installed: {INSTALL}")
    letters = built_in.load_reward_recogniser().letters
    rewards: dict[str, Reward] = {"letters": letters, "legibility": built_in.legibility}
    return rewards, {"reward": letters, "heldout": built_in.load_heldout_recogniser().letters}


def _make_built_in(
    load: Callable[[Path], Any],
    base: Path,
    list_known: Callable[[Any], Sequence[str | Prompt]],
    write: Callable[[Key, Sequence[Any]], Tensor],
    rewards: Mapping[str, Reward],
    evaluators: Mapping[str, Reward],
) -> Job:
    """Return the job of a built-in model, with all its prompts."""
    return Job(
        load(base),
        list_known("train"),
        rewards,
        heldout=list_known("heldout"),
        evaluators=evaluators,
        load=load,
        data=lambda key, prompts: write(key, model_inputs(prompts)),
        encode=lambda images: images * 2 - 1,
    )


def build_job(model: str, *, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = ()) -> Job:
    """Return the job of a built-in model.

    Args:
        weights: folder of the model's weights; by default the shipped base.
        prompts: files of prompts to train on, see `data.prompts.sources`; by default all that are not held out.
        data: images with captions, which are the prompts, see `data.images.read_images`.

    Raises:
        UsageError: there is no such model, or a file holds a line that is not a prompt.
    """
    if model not in MODELS:
        raise UsageError(
            "model", model, f"{' or '.join(MODELS)}, a folder, or an id on the Hub such as owner/name (fluvial models)"
        )
    job: Job = resolve_name(MODELS[model].job)()
    job = job if weights is None else job.with_weights(weights)
    if not prompts and not data:
        return job
    columns, heldout = list_media_columns(job.model, ()), texts(job.heldout)
    train, source_weights = read_training(prompts, data, check=job.model.check_prompt, heldout=heldout, media=columns)
    check_columns(job.model, train, columns)
    if columns:
        with convert_errors(UsageError, ValueError):
            job.model.encode(model_inputs(train))
    return replace(job, prompts=train, source_weights=source_weights)


def open_to_sample(
    name: str,
    settings: PipelineConfig,
    *,
    steps: int,
    guidance: Guidance,
    weights: Path | None = None,
    compute: torch.dtype = torch.float32,
    prompts: Sequence[str] = (),
) -> Job:
    """Open the job of a model for sampling only: without training prompts, except those of a built-in model.

    Args:
        name: built-in model, folder or Hub id of a pipeline, or `module:name`.
        settings: size of the images, and settings of the pipeline.
        steps: number of steps per sample.
        guidance: guidance of the steps.
        weights: folder of weights in place of the model's default ones.
        compute: dtype of the network's computations.
        prompts: files of prompts that a pipeline without an adapter is recorded on, see `open_to_train`.

    Raises:
        UsageError: there is no such model, the weights are of another model, or prompts would be ignored.
    """
    if name in MODELS:
        _check_unset(name, settings)
        if prompts:
            raise no_effect("prompts", f"with model {name}, which accepts any")
        return build_job(name, weights=weights)
    read = partial(_with_prompts, settings=settings, prompts=prompts) if prompts else None
    job = open_job(name, settings, steps=steps, guidance=guidance, compute=compute, prompts=read)
    model: Any = job.model
    if prompts and not is_recorded(model):
        raise no_effect("prompts", f"with model {name}, whose adapter accepts any")
    load = partial(OtherWeights, model) if is_adapter(name) else model.with_weights
    return with_base(replace(job, load=load), weights)


def open_to_train(
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
    read_before: RunPrompts | None = None,
) -> Job:
    """Open the job of training a model: a built-in one, a diffusers pipeline, or a user-defined one.

    Args:
        name, settings, steps, guidance, weights, compute: see `open_to_sample`.
        prompts: files of prompts to train on, see `data.prompts.sources`.
        data: images with captions, which are the prompts, see `data.images.read_images`.
        preferences: folder of a preference dataset, whose prompts are the job's if there are no other files.
        read_before: prompts in place of those of files.

    Raises:
        UsageError: there are no prompts, the model cannot be opened or trained, or it does not support the size.
    """
    if not _is_opened(name):
        if name in MODELS:
            _check_unset(name, settings)
        return build_job(name, weights=weights, prompts=prompts, data=data)
    if not prompts and not data and preferences is None and read_before is None:
        check_exists(name)
        raise UsageError(
            f"model {name} needs prompts to train on: set `prompts` to a file, .txt with one prompt per line, "
            ".jsonl, .json, .csv or .parquet with a column prompt; for sft, set `data.images` to a folder of images with "
            "captions"
        )

    read = partial(
        _with_prompts, settings=settings, prompts=prompts, data=data, preferences=preferences, read_before=read_before
    )
    job = open_job(name, settings, steps=steps, guidance=guidance, compute=compute, prompts=read)
    model: Any = job.model
    train = job.prompts
    if job.sizes and prompts:
        train = assign_recorded_sizes(train, list(job.sizes))
    job = replace(job, prompts=train)
    if is_adapter(name):
        return with_base(job, weights)

    def prepare(world: World, texts: Sequence[Any]) -> None:
        if settings.text_cache is not None:
            with world.agreed():  # waits until every rank has written its prompts
                try:
                    texts_here = texts[world.rank :: world.size]
                    for prompt in count_parts("encoding", texts_here, 1, len(texts_here), unit="prompts"):
                        model.encode([prompt])
                except ValueError as error:
                    raise UsageError(f"model {name}: {error}") from error
                except OSError as error:
                    raise RunError(f"{error}; what is encoded is kept, start again to go on") from error
            model.release()

    def check(module: nn.Module) -> str:
        error = model.check(module, model_inputs([*train[:2], *train[:1]][:2]))
        columns_of_media = list_media_columns(model, settings.media)
        from_columns = "".join(f", {name} from the column {columns_of_media[name]}" for name in train[0].media)
        layers = len(find_lora_layers(module))
        trained = sum(part.numel() for part in module.parameters() if part.requires_grad)
        adapted = f"; LoRA adapts {layers} linear layers, {trained} parameters" if layers else ""
        size, (height, width) = settings.size, model.decode(torch.zeros(1, *job.shape)).shape[-2:]
        scale = model.call_arguments.get("guidance_scale", guidance.scale)
        hint = (
            f"; guidance_scale {scale:g}, the pipeline's default" if guidance.scale == 1 and scale not in (1, None) else ""
        )
        other = f"; its images have {width}x{height} pixels, not the {size.width}x{size.height} asked for"
        return (
            f"no adapter for {model.pipeline}: {model.how}{from_columns}, "
            f"velocities and images within {error:.1g}{adapted}{hint}{other if size != (height, width) else ''}"
        )

    job = replace(job, load=model.with_weights, prepare=prepare, check=check if is_recorded(model) else None)
    return with_base(job, weights)


def _with_prompts(
    model: Any,
    *,
    settings: PipelineConfig,
    prompts: Sequence[str],
    data: Sequence[str] = (),
    preferences: Path | None = None,
    read_before: RunPrompts | None = None,
) -> tuple[Any, RunPrompts]:
    """Return the model adapted to the prompts of a run, and these prompts; see `open_to_train`."""
    columns = {} if data else list_media_columns(model, settings.media)
    prompts_of = read_before or read_run_prompts(
        settings, prompts=prompts, preferences=preferences, data=data, check=model.check_prompt, media=columns
    )
    if not data:
        check_columns(model, [*list_examples(prompts_of.train, prompts_of.heldout)], columns)
    if is_recorded(model):
        model = model.adapt_to(model_inputs([*prompts_of.train, *prompts_of.heldout]))
    return model, prompts_of


def _check_unset(name: str, settings: PipelineConfig) -> None:
    """Raise UsageError if settings of a pipeline are set for a built-in model."""
    for field in fields(settings):
        if getattr(settings, field.name) != field.default:
            raise no_effect(f"pipeline.{field.name}", f"with model {name}")


def check_has_reward(model: str, rewards: Sequence[str]) -> None:
    """Raise UsageError if a pipeline or custom model, which has no reward, is trained without `rewards`."""
    if _is_opened(model) and not rewards:
        raise UsageError(
            f"model {model} comes without a reward to learn from: set `rewards`, e.g. to pickscore, or to your own "
            "module:name (fluvial rewards lists them)"
        )


def _is_opened(name: str) -> bool:
    """Return whether a name is that of a pipeline, a folder or a custom model, and not of a built-in model."""
    return name not in MODELS and ("/" in name or Path(name).exists() or is_adapter(name))


def open_configured(config: TrainConfig) -> Job:
    """Open the job that a run's configuration describes.

    Raises:
        UsageError: there is no such model, or it cannot be trained as configured.
    """
    config = from_run(config)
    for name, why in config.list_unused_by_built_in():
        if is_set(config, name):
            raise no_effect(name, why)
    pipeline, source = replace(config.pipeline, weights=None), config.method.source
    preferences = source.folder if isinstance(source, Preferences) else None
    if config.model not in MODELS and (config.data.images or preferences is not None) and pipeline.text_cache is None:
        pipeline = replace(pipeline, text_cache=locate_cache(config) / "texts")  # captions, like images, are encoded once
    if (config.prompts or config.data.images) and config.method.is_scored and config.method.needs.rewards is not None:
        check_has_reward(config.model, config.rewards)
    job = _open_to_train(config, pipeline, prompts=config.prompts, data=config.data.images, preferences=preferences)
    check_second_scale(job.model, guided=config.is_guided)
    return with_images(job, config)


def open_for_run(config: TrainConfig, job: Job | None) -> Job:
    """Open the job of a run: the given job, whose model is opened if it is a name; by default that of `open_configured`.

    Raises:
        UsageError: the run is for another model, or the model cannot be opened.
    """
    if job is None:
        return open_configured(config)
    if job.is_opened:
        return job
    name: Any = job.model
    if config.model != name:
        recipe = f"recipes.{config.method.method_name}({name!r})"
        raise UsageError(f"job: model is {name}, and the run is for {config.model}: use the model's recipe, e.g. {recipe}")
    if not _is_opened(name):
        return replace(
            open_configured(config), prompts=job.prompts, heldout=job.heldout, rewards=job.rewards, evaluators=job.evaluators
        )
    if config.prompts or config.data.images:
        field = "prompts" if config.prompts else "data.images"
        raise no_effect(field, "with a job that has prompts")
    prompts = RunPrompts(job.prompts, job.heldout, dict(job.source_weights))
    opened = _open_to_train(config, replace(config.pipeline, weights=None), read_before=prompts)
    return replace(opened, rewards=job.rewards, evaluators=job.evaluators)


def _open_to_train(config: TrainConfig, pipeline: PipelineConfig, **sources: Any) -> Job:
    """Open the job of training the model of a run, see `open_to_train`."""
    sampling = config.method.sampling
    settings: Any = {"steps": sampling.steps, "guidance": sampling.guidance, "weights": config.pipeline.weights}
    compute = config.engine.compute_dtype(find_default_device())
    return open_to_train(config.model, pipeline, **settings, compute=compute, **sources)


def build(job: Job, *, empty: bool = False) -> nn.Module:
    """Build a job's network with its weights on the CPU, or, if `empty`, with parameters on the meta device.

    Raises:
        UsageError: the weights are missing, damaged or of another model.
    """
    try:
        return job.model.build(empty=empty)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the model cannot be loaded: {reason}") from error
