"""Jobs that learn from images (with captions, or pairs of preferences), which are encoded once into a cache."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.engines.data.image_cache import ImageCache
from fluvial.engines.data.preferences import read_preference_records
from fluvial.engines.data.prompt_table import PromptTable
from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.base import Job
from fluvial.engines.run.method import Preferences
from fluvial.models.digests import describe_code


def with_images(job: Job, config: TrainConfig) -> Job:
    """Return the job with the images of the run encoded into a cache; unchanged if the run learns from none.

    Raises:
        UsageError: the model cannot encode images.
    """
    source = config.method.source
    preferences = source.folder if isinstance(source, Preferences) else None
    if not config.data.images and preferences is None:
        return job
    encode = _choose_encoder(job, config)
    shapes: Any = job.sizes or {config.pipeline.size: job.shape}
    cache = ImageCache(
        locate_cache(config),
        settings=_describe_encoder(job, config),
        encode=encode,
        shapes=shapes if job.encode is None else {None: job.shape},
        skip=config.data.errors == "skip",
        compare=_find_fingerprint(job) is None,
    )
    # Records of held-out prompts are skipped.
    heldout = sorted({*texts(job.heldout)} - {*texts(job.prompts)})

    def prepare(world: World, texts: Sequence[Any]) -> Sequence[Prompt]:
        groups: list[tuple[Path | bytes, ...]]
        if preferences is None:
            groups = [(image,) for prompt in job.prompts if (image := prompt.image) is not None]
        else:
            records = read_preference_records(preferences, check=job.model.check_prompt, skip=heldout)
            groups = [(record.win, record.lose) for record in records]
        cache.fill(groups, world)
        if job.prepare is not None:
            job.prepare(world, texts)
        if preferences is not None:
            return job.prompts
        pairs = ((prompt, image) for prompt in job.prompts if (image := prompt.image) is not None)
        kept = PromptTable(
            replace(prompt, size=cache.sizes[image]) for prompt, image in pairs if (image,) not in cache.left_out
        )
        if not kept:
            raise UsageError("no image of the data can be used: all are unreadable or fit none of the sizes")
        return kept

    def read_samples(drawn: Key, prompts: Sequence[Prompt]) -> Tensor:
        sized = ((image, prompt.size) for prompt in prompts if (image := prompt.image) is not None)
        return torch.stack([cache.sample(image, size) for image, size in sized])

    data = read_samples if config.data.images else job.data
    return replace(job, encode=encode, prepare=prepare, images=cache, data=data)


def locate_cache(config: TrainConfig) -> Path:
    """Return the folder of a run's encoded images."""
    return config.out / "encoded" if config.data.cache is None else config.data.cache


def _choose_encoder(job: Job, config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """Return the function from images to clean samples: that of the job, or else of its model."""
    if job.encode is not None:
        return job.encode
    encode_images: Any = getattr(job.model, "encode_images", None)
    if encode_images is None:
        raise UsageError(
            f"images cannot be encoded into samples of {config.model}, which has no encode_images(images): add the "
            "method, or pass encode to the job"
        )

    def encode(images: Tensor) -> Tensor:
        samples: Tensor = encode_images(images, key=_derive_keys(images) if config.pipeline.latents == "sample" else None)
        return samples

    return encode


def _derive_keys(images: Tensor) -> Key:
    """Derive a key per image from its pixels only."""
    digests = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in images.cpu().contiguous()]
    return fold_in(key(0), torch.tensor([int(digest[:15], 16) for digest in digests]))


def _describe_encoder(job: Job, config: TrainConfig) -> dict[str, str]:
    """Describe all that an encoded image depends on besides its file and size."""
    fingerprint = _find_fingerprint(job)
    code = None if fingerprint is not None else describe_code(job.encode or cast(Any, job.model).encode_images)
    known = f"{config.model} {code}" if fingerprint is None else fingerprint()
    return {"encoder": f"{type(job.model).__name__} {known}", "latents": config.pipeline.latents}


def _find_fingerprint(job: Job) -> Callable[[], str] | None:
    """Return the model's function that fingerprints its image encoder; None for a user-defined encoder."""
    return None if job.encode is not None else getattr(job.model, "fingerprint_image_encoder", None)
