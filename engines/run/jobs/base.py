"""A job: a model, the prompts it is trained and evaluated on, and its rewards. A recipe says how it is trained."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fluvial.core.random import Key
from fluvial.engines.data.image_cache import ImageCache
from fluvial.engines.data.prompt_table import PromptTable
from fluvial.engines.data.prompts import split_off
from fluvial.engines.data.records import Prompt, as_prompts
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.scoring.protocol import Reward
from fluvial.models import DiffusionModel, check_model


@dataclass(frozen=True, init=False)
class Job:
    """A model, the prompts it is trained and evaluated on, the rewards it learns from, and the evaluators.

        job = Job(model=Handwriting(), prompts=["0427", "1999", ...], rewards=bright)

    An evaluator is a reward that training never sees; a sample that it scores 1 counts as exactly right. The evaluator named
    `heldout` should share neither data nor model with the reward, so that reward hacking shows.

    Args:
        model: model to train; `job.handwriting` and `job.to_train` return a job with one. A text is the folder of a pipeline
            of diffusers, or its id on the Hub, which the run opens with its settings of pipelines.
        prompts: prompts to train on: strings, or `data.records.Prompt` with metadata for the rewards.
        rewards: reward, or rewards by name; a run uses the first unless `TrainConfig.rewards` names others.
        heldout: prompts to evaluate on; by default every tenth of `prompts`, which is then not trained on.
        evaluators: evaluator, or evaluators by name; by default the rewards of the run.
        shape: shape of one sample; by default `model.latent_shape()`, for models that have one size.
        load: function from a folder of weights to a model with these weights; needed for a teacher.
        data: function (key, prompts as `data.records.Prompt`) -> clean samples `[B, *event]`, for supervised training.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples, for given preferences.
        prepare: function (world, texts) that is called once before training, on every rank; texts are all that the run
            encodes: prompts and negative prompts, each a string, or a `MediaPrompt` of one with images. It may return the
            prompts that can be trained on.
        check: function of the network that is called once before the first update, on every rank; it returns a line to show,
            or raises ValueError.
        source_weights: weight of each source of the prompts by its name; 1 where there is none.
        images: encoded images of given preferences; without it they are encoded when they are read.
        sizes: shape of a sample of each size, where samples have several; `shape` is that of evaluations.

    Raises:
        UsageError: an argument is not what it should be.
    """

    model: DiffusionModel
    prompts: Sequence[Prompt]
    rewards: Mapping[str, Reward]
    heldout: Sequence[Prompt]
    evaluators: Mapping[str, Reward]
    shape: tuple[int, ...]
    load: Callable[[Path], DiffusionModel] | None
    data: Callable[[Key, Sequence[Prompt]], Tensor] | None
    encode: Callable[[Tensor], Tensor] | None
    prepare: Callable[[World, Sequence[Any]], Sequence[Prompt] | None] | None
    check: Callable[[nn.Module], str] | None
    source_weights: Mapping[str, float]
    images: ImageCache | None
    sizes: Mapping[Size, tuple[int, ...]]

    def __init__(
        self,
        model: DiffusionModel | str,
        prompts: Sequence[str | Prompt],
        rewards: Mapping[str, Reward] | Reward | None = None,
        *,
        heldout: Sequence[str | Prompt] | None = None,
        evaluators: Mapping[str, Reward] | Reward | None = None,
        shape: Sequence[int] | None = None,
        load: Callable[[Path], DiffusionModel] | None = None,
        data: Callable[[Key, Sequence[Prompt]], Tensor] | None = None,
        encode: Callable[[Tensor], Tensor] | None = None,
        prepare: Callable[[World, Sequence[Any]], Sequence[Prompt] | None] | None = None,
        check: Callable[[nn.Module], str] | None = None,
        source_weights: Mapping[str, float] | None = None,
        images: ImageCache | None = None,
        sizes: Mapping[Size, tuple[int, ...]] | None = None,
    ) -> None:
        try:
            if not isinstance(model, str):
                check_model(model, "model")
        except ValueError as error:
            made = "fluvial.engines.run.job.handwriting and .to_train make jobs with one"
            raise UsageError(f"job: {error}; see fluvial.models.protocol, or {made}") from error
        train = _records("prompts", prompts)
        train, apart = split_off(train) if heldout is None else (train, _records("heldout", heldout))
        values = {
            "model": model,
            "prompts": train,
            "rewards": _name_rewards("rewards", rewards),
            "heldout": apart,
            "evaluators": _name_rewards("evaluators", evaluators),
            "shape": tuple(shape) if shape is not None else () if isinstance(model, str) else only_shape(model),
            "load": load,
            "data": data,
            "encode": encode,
            "prepare": prepare,
            "check": check,
            "source_weights": dict(source_weights or {}),
            "images": images,
            "sizes": dict(sizes or {}),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_opened(self) -> bool:
        """Whether the model is there, rather than its name."""
        return not isinstance(self.model, str)

    def check_prompts(self) -> None:
        """Raise UsageError, in one line, if there are no prompts, or one of them is not a prompt of the model."""
        for field, prompts in (("prompts", self.prompts), ("heldout", self.heldout)):
            if not prompts:
                raise UsageError(f"job: {field} is empty, expected at least one prompt")
            for i, prompt in enumerate(prompts):
                with convert_errors(UsageError, ValueError, says=f"job: {field}[{i}]"):
                    self.model.check_prompt(prompt.text)

    def with_weights(self, weights: Path) -> "Job":
        """Return the job with the model of another folder of weights; UsageError if the job cannot load other weights."""
        if self.load is None:
            raise UsageError(f"{weights} cannot be loaded: this job has no function from a folder to a model (load)")
        return replace(self, model=self.load(weights))


def _records(field: str, prompts: Sequence[str | Prompt]) -> Sequence[Prompt]:
    """Return prompts as records."""
    if isinstance(prompts, PromptTable):
        return prompts
    if isinstance(prompts, str | bytes | Path) or not isinstance(prompts, Sequence):
        raise UsageError(f"job: {field} is of type {type(prompts).__name__}, expected a list of strings")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str | Prompt):
            raise UsageError(f"job: {field}[{i}] is of type {type(prompt).__name__}, expected a string")
    return as_prompts(prompts)


def _name_rewards(field: str, rewards: Mapping[str, Reward] | Reward | None) -> dict[str, Reward]:
    """Return rewards by name; a single function is named after itself."""
    if rewards is None:
        return {}
    if isinstance(rewards, Mapping):
        return dict(rewards)
    if not callable(rewards):
        raise UsageError(f"job: {field} is of type {type(rewards).__name__}, expected a function, or functions by name")
    name = str(getattr(rewards, "__name__", "reward"))
    return {name if name.isidentifier() else "reward": rewards}


def has_frames(frames: int, shape: tuple[int, ...]) -> bool:
    """Return whether samples of a number of frames and a shape are videos."""
    return frames > 1 or len(shape) > 3


def only_shape(model: DiffusionModel) -> tuple[int, ...]:
    """Return the shape of a sample of a model that has one size; UsageError if the model has several sizes."""
    if not has_one_size(model):
        raise UsageError("job: shape is missing: pass shape=model.latent_shape(height, width)")
    latent_shape: Callable[..., tuple[int, ...]] = model.latent_shape
    return tuple(latent_shape())


def has_one_size(model: DiffusionModel) -> bool:
    """Return whether `latent_shape` can be called without a size."""
    try:
        inspect.signature(model.latent_shape).bind()
    except TypeError:
        return False
    return True
