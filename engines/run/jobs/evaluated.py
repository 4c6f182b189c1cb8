"""Jobs for evaluations: with the prompts, evaluators and image size of an evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from fluvial.engines.data.prompt_table import list_examples
from fluvial.engines.data.prompts import read_heldout
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.base import Job, find_only_shape, has_frames, has_one_size
from fluvial.engines.run.jobs.media import check_columns, list_media_columns
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.scoring.audio import with_audio
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.registry import check_rewards, select
from fluvial.models import decode_samples, is_recorded


def build_evaluated(job: Job, config: EvaluationConfig, pipeline: PipelineConfig) -> Job:
    """Return the job with the held-out prompts, evaluators and shape of an evaluation.

    Args:
        pipeline: settings with the default size of the images.

    Raises:
        UsageError: a file or an evaluator is invalid, or the model does not support the size.
    """
    changes: dict[str, Any] = {}
    if config.prompts:
        columns, field = list_media_columns(job.model, pipeline.media), "evaluation.prompts"
        heldout = read_heldout(config.prompts, (), check=job.model.check_prompt, field=field, media=columns)
        check_columns(job.model, [*job.prompts[:1], *list_examples(heldout)], columns)
        changes["heldout"] = heldout
    if config.rewards:
        changes["evaluators"] = select_evaluators(job, config.rewards, frames=pipeline.frames, field="evaluation.rewards")
    if config.height is not None or config.width is not None:
        height, width = config.height or pipeline.size.height, config.width or pipeline.size.width
        changes["shape"] = _find_shape(job, height, width, pipeline.frames)
    return replace(job, **changes) if changes else job


def with_job_size(job: Job, pipeline: PipelineConfig) -> PipelineConfig:
    """Return the settings of a pipeline with the size of a job's samples, for the record of the run.

    Raises:
        UsageError: no size of the model has samples of that shape.
    """
    if job.sizes:
        first = [size for size, shape in job.sizes.items() if tuple(shape) == job.shape]
        if not first:
            raise UsageError(f"job: shape is {list(job.shape)}, expected that of one of its sizes")
        words = tuple(map(str, dict.fromkeys([*first, *job.sizes])))
        return replace(pipeline, sizes=words, height=PipelineConfig.height, width=PipelineConfig.width)
    if (has_one_size(job.model) and find_only_shape(job.model) == job.shape) or _has_size(
        job, *pipeline.size, pipeline.frames
    ):
        return pipeline
    with torch.no_grad():
        decoded = decode_samples(job.model, torch.zeros(1, *job.shape), model_inputs(job.prompts[:1])).shape
    frames, (height, width) = decoded[2] if len(decoded) == 5 else 1, decoded[-2:]
    if not (is_recorded(job.model) or _has_size(job, height, width, frames)):
        raise UsageError(
            f"job: shape is {list(job.shape)}, and its images have {width}x{height} pixels, for which the model has another "
            "shape: pass shape=model.latent_shape(height, width)"
        )
    return replace(pipeline, sizes=(), height=height, width=width, frames=frames)


def _has_size(job: Job, height: int, width: int, frames: int) -> bool:
    """Return whether the job's samples are those of a size."""
    try:
        return tuple(job.model.latent_shape(height, width, frames)) == job.shape
    except ValueError:
        return False


def select_evaluators(job: Job, names: Sequence[str], *, field: str, frames: int = 1) -> dict[str, Reward]:
    """Return evaluators by name: rewards and evaluators of the job, installed ones, or `module:name`.

    Raises:
        UsageError: a name is unknown or repeated, or is not a reward.
    """
    videos = has_frames(frames, job.shape)
    selected = select({**job.rewards, **job.evaluators}, names, field=field, videos=videos)
    if weighted := [name for name, (_, weight) in selected.items() if weight != 1]:
        raise UsageError(
            f"`{field}` gives {weighted[0]!r} a weight, and evaluators have none, because each is reported separately: "
            "remove the weight"
        )
    rewards = {name: reward for name, (reward, _) in selected.items()}
    check_rewards(rewards, label="evaluator")
    return with_audio(rewards, job.model)


def list_texts(job: Job, evaluated: Job, guidance: Guidance) -> Sequence[Any]:
    """Return all texts that a run encodes: prompts of the job and its evaluations, and with guidance negative prompts.

    The list is computed when it is first read, because most jobs with many prompts never read it.
    """
    return _LazyTexts(
        lambda: list(dict.fromkeys(guidance.list_texts(job.model, [*job.prompts, *job.heldout, *evaluated.heldout])))
    )


class _LazyTexts(Sequence[Any]):
    """Sequence that is computed when it is first read."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make

    @cached_property
    def _texts(self) -> list[Any]:
        return self._make()

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    def __getitem__(self, place: Any) -> Any:
        """Return a text, or the list of a slice."""
        return self._texts[place]


def check_negatives(prompts: Sequence[Prompt], *, guided: bool, field: str) -> None:
    """Raise UsageError if a prompt has a negative prompt and there is no guidance.

    Args:
        guided: whether samples are guided.
        field: setting of the guidance, for the message.
    """
    opposed = next((prompt for prompt in prompts if prompt.negative is not None), None)
    if opposed is not None and not guided:
        raise UsageError(
            f"prompt {opposed.text!r} has a negative prompt, which has no effect without guidance: set {field}, or remove "
            "the column negative_prompt"
        )


def _find_shape(job: Job, height: int, width: int, frames: int) -> tuple[int, ...]:
    """Return the shape of a sample of another size."""
    if is_recorded(job.model):
        raise UsageError(
            "`evaluation.height` and `evaluation.width` have no effect with a model without adapter, which has only the "
            "size of the rollout; remove them"
        )
    if has_one_size(job.model):
        raise UsageError(
            "`evaluation.height` and `evaluation.width` have no effect: the model has images of one size only; remove them"
        )
    with convert_errors(UsageError, ValueError, says=f"`evaluation.height` is {height} and `evaluation.width` is {width}"):
        return tuple(job.model.latent_shape(height, width, frames))
