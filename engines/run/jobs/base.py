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
        model: model to train, as in the jobs of `job.handwriting` and `job.open_to_train`. A string is the folder or Hub id
            of a diffusers pipeline, which the run opens with its settings `pipeline`.
        prompts: prompts to train on: strings, or `data.records.Prompt` with metadata for the rewards.
        rewards: reward, or rewards by name; a run uses the first unless `TrainConfig.rewards` names others.
        heldout: prompts to evaluate on; by default every tenth of `prompts`, which is then not trained on.
        evaluators: evaluator, or evaluators by name; by default the rewards of the run.
        shape: shape of one sample; by default `model.latent_shape()`, for models that have one size.
        load: function from a folder of weights to a model with these weights; needed for a teacher.
        data: function (key, prompts as `data.records.Prompt`) -> clean samples `[B, *event]`, for supervised training.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples, for a preference dataset.
        prepare: function (world, texts), called once before training on every rank. The texts are all that the run encodes:
            prompts and negative prompts, each a string, or a `MediaPrompt` with images. It may return the prompts that can
            be trained on.
        check: function of the network, called once before the first update on every rank; it returns a line for the console,
            or raises ValueError.
        source_weights: weight of each source of prompts by name; 1 by default.
        images: encoded images of a preference dataset; by default they are encoded when they are read.
        sizes: shape of a sample by size, if samples have several sizes; `shape` is that of evaluations.

    Raises:
        UsageError: an argument has a wrong type or value.
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
            hint = "fluvial.engines.run.job.handwriting and .open_to_train make jobs with one"
            raise UsageError(f"job: {error}; see fluvial.models.protocol, or {hint}") from error
        train = _convert_prompts("prompts", prompts)
        train, kept_out = split_off(train) if heldout is None else (train, _convert_prompts("heldout", heldout))
        values = {
            "model": model,
            "prompts": train,
            "rewards": _name_rewards("rewards", rewards),
            "heldout": kept_out,
            "evaluators": _name_rewards("evaluators", evaluators),
            "shape": tuple(shape) if shape is not None else () if isinstance(model, str) else find_only_shape(model),
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
        """Whether the job has its model rather than the model's name."""
        return not isinstance(self.model, str)

    def check_prompts(self) -> None:
        """Raise UsageError, in one line, if there are no prompts, or the model does not accept one of them."""
        for field, prompts in (("prompts", self.prompts), ("heldout", self.heldout)):
            if not prompts:
                raise UsageError(f"job: {field} is empty, expected at least one prompt")
            for i, prompt in enumerate(prompts):
                with convert_errors(UsageError, ValueError, says=f"job: {field}[{i}]"):
                    self.model.check_prompt(prompt.text)

    def with_weights(self, weights: Path) -> "Job":
        """Return the job with the weights of another folder; UsageError if the job has no `load`."""
        if self.load is None:
            raise UsageError(f"{weights} cannot be loaded: this job has no function from a folder to a model (load)")
        return replace(self, model=self.load(weights))


def _convert_prompts(field: str, prompts: Sequence[str | Prompt]) -> Sequence[Prompt]:
    """Convert prompts to records."""
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


def find_only_shape(model: DiffusionModel) -> tuple[int, ...]:
    """Return the shape of a sample of a model with one size; UsageError if the model has several sizes."""
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
