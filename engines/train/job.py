"""Jobs: a model, the prompts it is trained and evaluated on, and its rewards. A recipe says how it is trained."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fluvial.core.random import Key
from fluvial.engines.data.preferences import Preference, preferred_prompts
from fluvial.engines.data.prompts import read_prompts, split_off
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.train.config import BUILT_IN, PipelineConfig, TrainConfig
from fluvial.models import DiffusionModel, is_recorded

# What is asked of a model at the door; `models.protocol` says what each is for.
METHODS = ("build", "blocks", "schedule", "check_prompt", "encode", "predict", "decode")


@dataclass(frozen=True, init=False)
class Job:
    """A model, the prompts it is trained and evaluated on, the rewards it learns from, and the evaluators.

        job = Job(model=Handwriting(), prompts=["0427", "1999", ...], rewards=bright)

    An evaluator is a reward that training never sees; a sample that it scores 1 counts as exactly right. The evaluator named
    `heldout` should share neither data nor model with the reward, so that reward hacking shows.

    Args:
        model: model to train; `handwriting` and `pipeline` below return a job with one.
        prompts: prompts to train on.
        rewards: reward, or rewards by name; a run uses the first unless `TrainConfig.rewards` names others.
        heldout: prompts to evaluate on; by default every tenth of `prompts`, which is then not trained on.
        evaluators: evaluator, or evaluators by name; by default the rewards of the run.
        shape: shape of one sample; by default `model.latent_shape()`, for models that have one size.
        load: function from a folder of weights to a model with these weights; needed for a teacher.
        data: function (key, prompts) -> clean samples `[B, *event]`, for supervised training.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples, for given preferences.
        prepare: function (world, negative prompts) that is called once before training, on every rank.
        check: function of the network that is called once before the first update, on every rank; it returns a line to show,
            or raises ValueError.

    Raises:
        UsageError: an argument is not what it should be.
    """

    model: DiffusionModel
    prompts: tuple[str, ...]
    rewards: Mapping[str, Reward]
    heldout: tuple[str, ...]
    evaluators: Mapping[str, Reward]
    shape: tuple[int, ...]
    load: Callable[[Path], DiffusionModel] | None
    data: Callable[[Key, Sequence[str]], Tensor] | None
    encode: Callable[[Tensor], Tensor] | None
    prepare: Callable[[World, Sequence[str]], None] | None
    check: Callable[[nn.Module], str] | None

    def __init__(
        self,
        model: DiffusionModel,
        prompts: Sequence[str],
        rewards: Mapping[str, Reward] | Reward | None = None,
        *,
        heldout: Sequence[str] | None = None,
        evaluators: Mapping[str, Reward] | Reward | None = None,
        shape: Sequence[int] | None = None,
        load: Callable[[Path], DiffusionModel] | None = None,
        data: Callable[[Key, Sequence[str]], Tensor] | None = None,
        encode: Callable[[Tensor], Tensor] | None = None,
        prepare: Callable[[World, Sequence[str]], None] | None = None,
        check: Callable[[nn.Module], str] | None = None,
    ) -> None:
        if missing := [name for name in METHODS if not callable(getattr(model, name, None))]:
            raise UsageError(
                f"job: model is of type {type(model).__name__} and has no {missing[0]}(), expected a DiffusionModel "
                "(fluvial.models.protocol): fluvial.engines.train.job.handwriting and .pipeline make jobs with one"
            )
        prompts = _strings("prompts", prompts)
        if heldout is None:
            prompts, heldout = split_off(prompts)
        values = {
            "model": model,
            "prompts": prompts,
            "rewards": _named("rewards", rewards),
            "heldout": _strings("heldout", heldout),
            "evaluators": _named("evaluators", evaluators),
            "shape": tuple(shape) if shape is not None else _only_shape(model),
            "load": load,
            "data": data,
            "encode": encode,
            "prepare": prepare,
            "check": check,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check_prompts(self) -> None:
        """Raise UsageError, in one line, if there are no prompts, or one of them is not a prompt of the model."""
        for field, prompts in (("prompts", self.prompts), ("heldout", self.heldout)):
            if not prompts:
                raise UsageError(f"job: {field} is empty, expected at least one prompt")
            for i, prompt in enumerate(prompts):
                try:
                    self.model.check_prompt(prompt)
                except ValueError as error:
                    raise UsageError(f"job: {field}[{i}]: {error}") from error

    def with_weights(self, weights: Path) -> "Job":
        """Return the job with the model of another folder of weights.

        Raises:
            UsageError: the job cannot load other weights.
        """
        if self.load is None:
            raise UsageError(f"{weights} cannot be loaded: this job has no function from a folder to a model (load)")
        return replace(self, model=self.load(weights))

    def blank_preference(self) -> Preference:
        """Return a preference between two samples of zeros, for a rank without preferences that has to take part."""
        return Preference(self.prompts[0], torch.zeros(self.shape), torch.zeros(self.shape))


def handwriting(*, weights: Path | None = None, prompts: Path | None = None, unet: bool = False) -> Job:
    """Return the built-in job: write 4-digit codes so that a recogniser reads them.

    Args:
        weights: folder of the model's weights; the shipped base by default.
        prompts: text file of codes to train on; by default all codes that are not held out.
        unet: train the UNet that predicts epsilon, not the transformer that predicts a velocity.
    """
    from fluvial.models import handwriting as built_in
    from fluvial.models.handwriting import codes, heldout_recogniser, reward_recogniser, write

    kind: Callable[[Path], Any] = built_in.HandwritingUNet if unet else built_in.Handwriting
    base = built_in.BASE_UNET if unet else built_in.BASE
    model = kind(base if weights is None else weights)
    recogniser, heldout = reward_recogniser(), codes("heldout")
    machine, neighbours = recogniser.each()
    return Job(
        model,
        codes("train") if prompts is None else read_prompts(prompts, check=model.check_prompt, heldout=heldout),
        {"characters": recogniser.characters, "machine": machine.characters, "neighbours": neighbours.characters},
        heldout=heldout,
        evaluators={"reward": recogniser.characters, "heldout": heldout_recogniser().characters},
        load=kind,
        data=write,
        encode=lambda images: images * 2 - 1,
    )


def pipeline(
    name: str, config: PipelineConfig, *, prompts: Path | None = None, preferences: Path | None = None, steps: int,
    guidance: Guidance, compute: torch.dtype,
) -> Job:  # fmt: skip
    """Return the job of training a diffusers pipeline, or a person's own model, on prompts from a file.

    Args:
        name: folder of the pipeline, its id on the Hub, or `module:name` of an own model (`models.load_adapter`).
        config: size of the images, and how the pipeline is opened.
        prompts: text file of prompts to train on, one per line.
        preferences: folder of preferences, whose prompts are the job's where there is no such file. The job has no function
            that encodes their images: pass one with `dataclasses.replace(job, encode=...)`.
        steps: steps per sample, of a pipeline without an adapter.
        guidance: guidance of its steps.
        compute: dtype that its network computes in.

    Raises:
        UsageError: there are no prompts, the pipeline cannot be opened or trained, or it makes no images of that size.
    """
    from fluvial.models.rewards.jpeg import jpeg_compressibility

    if prompts is None and preferences is None:
        raise UsageError(f"model {name} needs prompts to train on: set prompts to a text file with one prompt per line")
    job = opened(name, config, steps=steps, guidance=guidance, compute=compute)
    model: Any = job.model
    heldout = () if config.heldout is None else read_prompts(config.heldout, check=model.check_prompt)
    if prompts is not None:
        train = read_prompts(prompts, check=model.check_prompt, heldout=heldout)
    else:
        assert preferences is not None
        train = preferred_prompts(preferences, check=model.check_prompt, heldout=heldout)
    if not heldout:
        train, heldout = split_off(train)
    job = replace(job, prompts=train, heldout=heldout, rewards={"jpeg": jpeg_compressibility})
    if _is_adapter(name):
        return job

    def prepare(world: World, negative: Sequence[str]) -> None:
        if config.text_cache is not None:
            everything = list(dict.fromkeys([*train, *heldout, *negative]))
            for prompt in everything[world.rank :: world.size]:
                model.encode([prompt])
            world.gather(torch.zeros(1, device=world.device))  # until every rank has written its prompts
            model.release()

    def check(module: nn.Module) -> str:
        error = model.check(module, (train * 2)[:2])
        return f"no adapter for {model.pipeline}: replayed as it was recorded, its velocities within {error:.1g}"

    return replace(
        job,
        load=model.with_weights,
        prepare=prepare,
        check=check if is_recorded(model) else None,
    )


def opened(
    name: str, config: PipelineConfig, *, steps: int, guidance: Guidance, compute: torch.dtype = torch.float32
) -> Job:
    """Return the job of a pipeline without prompts, rewards and evaluators.

    Args:
        name, config, steps, guidance, compute: arguments of `pipeline`.

    Raises:
        UsageError: the pipeline cannot be opened, or makes no images of that size.
    """
    if _is_adapter(name):
        return _adapted(name, config)
    from fluvial.models.pipelines.folder import local_folder
    from fluvial.models.pipelines.open import has_adapter, open_model
    from fluvial.models.replay.any_pipeline import AnyPipeline

    half = config.frozen == "bfloat16" or (config.frozen == "auto" and torch.cuda.is_available())
    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "cache": config.text_cache, "trust_remote_code": config.trust_remote_code}
    if config.text_tokens is not None:
        options["text_tokens"] = config.text_tokens
    size: dict[str, Any] = {"height": config.height, "width": config.width, "frames": config.frames}
    try:
        folder = local_folder(name, trust_remote_code=config.trust_remote_code)
        model: Any
        if not has_adapter(folder):
            if config.shift is not None:
                raise ValueError("pipeline.shift is set, and the pipeline has no adapter, so that it makes its own schedule")
            options |= {"steps": steps, "scale": guidance.scale, "negative": guidance.negative, "compute": compute}
            model = AnyPipeline(folder, **size, call=dict(map(_named_value, config.call)), **options)
        elif config.call:
            raise ValueError("pipeline.call is set, and there is an adapter, which calls no pipeline: leave it as it is")
        else:
            if config.shift is not None:
                options["shift"] = config.shift
            model = open_model(folder, **options)
        shape = model.latent_shape(**size)
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error
    return Job(model, (), heldout=(), shape=shape)


def _is_adapter(name: str) -> bool:
    """Return whether a model's name is `module:name`."""
    return ":" in name and not Path(name).is_dir()


def _adapted(name: str, config: PipelineConfig) -> Job:
    """Return the job of a person's own model, without prompts, rewards and evaluators.

    Raises:
        UsageError: it cannot be loaded, or takes none of the settings.
    """
    from fluvial.models import load_adapter

    size: dict[str, Any] = {"height": config.height, "width": config.width, "frames": config.frames}
    sized = PipelineConfig(**size)
    try:
        if config != replace(sized, heldout=config.heldout):
            raise ValueError("a model of your own takes only height, width, frames and heldout of pipeline: leave the rest")
        model = load_adapter(name)
        # A model of one size says so by defaults, and then need not be told.
        shape = _only_shape(model) if sized == PipelineConfig() and _has_one_size(model) else model.latent_shape(**size)
    except (ValueError, OSError) as error:
        raise UsageError(f"model {name}: {error}") from error
    return Job(model, (), heldout=(), shape=shape)


def named(model: str, *, weights: Path | None = None, prompts: Path | None = None) -> Job:
    """Return the job of a built-in model.

    Args:
        model: name of the model.
        weights: folder of its weights; the shipped base by default.
        prompts: text file of prompts to train on.

    Raises:
        UsageError: there is no such model, or the file holds a line that is not a prompt.
    """
    if model not in BUILT_IN:
        raise UsageError(
            f"model is {model!r}, expected {' or '.join(BUILT_IN)}, a folder, or an id on the Hub such as owner/name "
            "(fluvial models)"
        )
    return handwriting(weights=weights, prompts=prompts, unet=model == BUILT_IN[1])


def of_run(config: TrainConfig) -> Job:
    """Return the job that a run's configuration describes: a built-in model's, or a pipeline's.

    Raises:
        UsageError: there is no such model, or it cannot be trained as configured.
    """
    elsewhere = "/" in config.model or Path(config.model).is_dir() or _is_adapter(config.model)
    if config.model in BUILT_IN or not elsewhere:
        return named(config.model, weights=config.weights, prompts=config.prompts)
    if (folder := config.objective.traits.preferences) is not None:
        raise UsageError(
            f"objective.preferences is {folder}, and images cannot be encoded into samples of "
            f"{config.model} yet: train {' or '.join(BUILT_IN)} on them, or leave objective.preferences out and set prompts "
            "to a text file, to learn from pairs of samples of each rollout"
        )
    rollout, device = config.rollout, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return pipeline(
        config.model, config.pipeline, prompts=config.prompts, steps=rollout.steps, guidance=rollout.guidance,
        compute=config.engine.compute_dtype(device),
    )  # fmt: skip


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


def _strings(field: str, prompts: Sequence[str]) -> tuple[str, ...]:
    """Return prompts as a tuple.

    Raises:
        UsageError: they are not a sequence of strings.
    """
    if isinstance(prompts, str | bytes | Path) or not isinstance(prompts, Sequence):
        raise UsageError(f"job: {field} is of type {type(prompts).__name__}, expected a list of strings")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UsageError(f"job: {field}[{i}] is of type {type(prompt).__name__}, expected a string")
    return tuple(prompts)


def _named(field: str, rewards: Mapping[str, Reward] | Reward | None) -> dict[str, Reward]:
    """Return rewards by name; a single function is named after itself.

    Raises:
        UsageError: they are neither a function nor functions by name.
    """
    if rewards is None:
        return {}
    if isinstance(rewards, Mapping):
        return dict(rewards)
    if not callable(rewards):
        raise UsageError(f"job: {field} is of type {type(rewards).__name__}, expected a function, or functions by name")
    name = str(getattr(rewards, "__name__", "reward"))
    return {name if name.isidentifier() else "reward": rewards}


def _only_shape(model: DiffusionModel) -> tuple[int, ...]:
    """Return the shape of a sample of a model that has one size.

    Raises:
        UsageError: the model has several sizes.
    """
    if not _has_one_size(model):
        raise UsageError("job: shape is missing: pass shape=model.latent_shape(height, width)")
    latent_shape: Callable[..., tuple[int, ...]] = model.latent_shape
    return tuple(latent_shape())


def _has_one_size(model: DiffusionModel) -> bool:
    """Return whether `latent_shape` can be called without a size."""
    try:
        inspect.signature(model.latent_shape).bind()
    except TypeError:
        return False
    return True


def _named_value(word: str) -> tuple[str, Any]:
    """Return the name and the value of name=value; the value is JSON, or else text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
