"""The job of a run: a built-in model's, a pipeline's, or a person's own; and its network."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fluvial.engines.data.images import read_images
from fluvial.engines.data.prompts import read_sources
from fluvial.engines.errors import UsageError
from fluvial.engines.train.config import BUILT_IN, TrainConfig
from fluvial.engines.train.jobs.base import Job
from fluvial.engines.train.jobs.images import cache_folder, with_images
from fluvial.engines.train.jobs.pipeline import is_adapter, opened, pipeline
from fluvial.engines.train.jobs.weights import from_run, with_base
from fluvial.engines.train.jobs.words import words
from fluvial.models import DiffusionModel

__all__ = ["Job", "build", "fresh", "from_run", "handwriting", "named", "of_run", "opened", "pipeline", "words"]


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
    train, weights_of = codes("train"), dict[str, float]()
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
        data=write,
        encode=lambda images: images * 2 - 1,
        source_weights=weights_of,
    )


def named(model: str, *, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = ()) -> Job:
    """Return the job of a built-in model.

    Args:
        model: name of the model.
        weights: folder of its weights; the shipped base by default.
        prompts: files of prompts to train on.
        data: images with captions.

    Raises:
        UsageError: there is no such model, or the file holds a line that is not a prompt.
    """
    if model not in BUILT_IN:
        raise UsageError(
            f"model is {model!r}, expected {' or '.join(BUILT_IN)}, a folder, or an id on the Hub such as owner/name "
            "(fluvial models)"
        )
    if model == "words":
        return words(weights=weights, prompts=prompts, data=data)
    return handwriting(weights=weights, prompts=prompts, data=data, unet=model == BUILT_IN[1])


def fresh(model: str, seed: int) -> DiffusionModel:
    """Return a built-in model with random weights.

    Args:
        model: name of the model.
        seed: seed of the weights.
    """
    from fluvial.models.handwriting import Handwriting, HandwritingUNet
    from fluvial.models.words import Words

    kinds: dict[str, Callable[..., DiffusionModel]] = dict(zip(BUILT_IN, (Handwriting, HandwritingUNet, Words), strict=True))
    return kinds[model](None, seed=seed)


def of_run(config: TrainConfig) -> Job:
    """Return the job that a run's configuration describes: a built-in model's, or a pipeline's.

    Raises:
        UsageError: there is no such model, or it cannot be trained as configured.
    """
    config = from_run(config)
    elsewhere = "/" in config.model or Path(config.model).is_dir() or is_adapter(config.model)
    if config.model in BUILT_IN or not elsewhere:
        return with_images(named(config.model, weights=config.weights, prompts=config.prompts, data=config.data), config)
    rollout, device = config.rollout, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = config.pipeline
    if (config.data or config.objective.traits.preferences is not None) and asked.text_cache is None:
        asked = replace(asked, text_cache=cache_folder(config) / "texts")  # captions, like images, are encoded once
    job = pipeline(
        config.model, asked, prompts=config.prompts, data=config.data, preferences=config.objective.traits.preferences,
        steps=rollout.steps, guidance=rollout.guidance,
        compute=config.engine.compute_dtype(device),
    )  # fmt: skip
    return with_images(with_base(job, config.weights), config)


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
