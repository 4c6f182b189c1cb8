"""Jobs: what is trained on what, and judged by whom. A recipe says how."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.runner import Reward
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.train.config import BUILT_IN, PipelineConfig, TrainConfig
from fluvial.models import DiffusionModel, is_recorded

PREFERENCES = "preferences.jsonl"


class Preference(NamedTuple):
    """Two samples of a prompt, `[*event]` each, of which one is preferred."""

    prompt: str
    win: Tensor
    lose: Tensor


@dataclass(frozen=True)
class Job:
    """A model, the prompts it is trained and evaluated on, the rewards it learns from, and the evaluators.

    An evaluator is a reward too; a sample that it scores 1 counts as exactly right. The evaluator named `heldout` must
    share neither data nor model with the reward, so that gaming the reward shows.

    Args:
        model: what is trained.
        shape: of one sample.
        train_prompts, heldout_prompts: trained on, evaluated on.
        rewards: by name; the first is used where a run names none.
        evaluators: by name; the rewards of the run where there are none.
        load: the model of another folder of weights, a teacher's say; None where there is none but the model's own.
        data: (key, prompts) -> clean samples `[B, *event]` for supervised training; None where there are none.
        encode: images `[B, C, H, W]` in [0, 1] -> clean samples; None where the model has no such way back.
        prepare: what is done once, by all ranks, before training, given the prompts that are guided away from.
        check: what is tried with the network once, by all ranks, before the first update; it returns a line to show, or
            raises ValueError.
    """

    model: DiffusionModel
    shape: tuple[int, ...]
    train_prompts: Sequence[str]
    heldout_prompts: Sequence[str]
    rewards: Mapping[str, Reward]
    evaluators: Mapping[str, Reward]
    load: Callable[[Path], DiffusionModel] | None = None
    data: Callable[[Key, Sequence[str]], Tensor] | None = None
    encode: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[World, Sequence[str]], None] | None = None
    check: Callable[[nn.Module], str] | None = None

    def with_weights(self, weights: Path) -> "Job":
        """Return the job with the model of another folder of weights.

        Raises:
            UsageError: the job's model has no other weights.
        """
        if self.load is None:
            raise UsageError(f"{weights} cannot be loaded: this job's model has no weights but its own")
        return replace(self, model=self.load(weights))

    def blank_preference(self) -> Preference:
        """Return a preference between two samples of zeros, for a rank that has nothing to do but has to take part."""
        return Preference(self.train_prompts[0], torch.zeros(self.shape), torch.zeros(self.shape))


def handwriting(*, weights: Path | None = None, prompts: Path | None = None, unet: bool = False) -> Job:
    """Return the built-in job: write 4-digit codes so that a recogniser reads them.

    Args:
        weights: folder of the model's weights; the shipped base by default.
        prompts: text file of codes to train on; by default all that are not held out.
        unet: the model is the UNet that predicts epsilon, not the transformer that predicts a velocity.
    """
    from fluvial.models import handwriting as built_in
    from fluvial.models.handwriting import codes, heldout_recogniser, reward_recogniser, write

    kind: Callable[[Path], Any] = built_in.HandwritingUNet if unet else built_in.Handwriting
    base = built_in.BASE_UNET if unet else built_in.BASE
    model = kind(base if weights is None else weights)
    recogniser = reward_recogniser()
    machine, neighbours = recogniser.each()
    return Job(
        model=model,
        shape=model.latent_shape(),
        train_prompts=codes("train") if prompts is None else read_prompts(prompts, model, heldout=codes("heldout")),
        heldout_prompts=codes("heldout"),
        rewards={
            "characters": recogniser.characters, "machine": machine.characters, "neighbours": neighbours.characters,
        },
        evaluators={"reward": recogniser.characters, "heldout": heldout_recogniser().characters},
        load=kind,
        data=write,
        encode=lambda images: images * 2 - 1,
    )  # fmt: skip


def pipeline(
    name: str, config: PipelineConfig, *, prompts: Path | None, steps: int, guidance: Guidance, compute: torch.dtype
) -> Job:
    """Return the job of training a pipeline of diffusers on a person's prompts.

    Args:
        name: its folder, or its id on the Hub.
        config: what it is asked for.
        prompts: text file of prompts to train on, one a line.
        steps, guidance: of its rollouts.
        compute: dtype of its network.

    Raises:
        UsageError: there are no prompts, there is no adapter for the model and it cannot do without, something is missing in
            its folder, or it makes no images of that size.
    """
    from fluvial.models.rewards.jpeg import jpeg_compressibility

    if prompts is None:
        raise UsageError(f"--model {name} needs prompts to train on: --prompts prompts.txt, one a line")
    job = opened(name, config, steps=steps, guidance=guidance, compute=compute)
    model: Any = job.model
    heldout = () if config.heldout is None else read_prompts(config.heldout, model, heldout=())
    train = read_prompts(prompts, model, heldout=heldout)
    if not heldout:  # a person with one prompt has no other to look at
        heldout = train[::10]
        train = tuple(prompt for prompt in train if prompt not in set(heldout)) or train

    def prepare(world: World, negative: Sequence[str]) -> None:
        if config.text_cache is not None:
            everything = list(dict.fromkeys([*train, *heldout, *negative]))
            for prompt in everything[world.rank :: world.size]:
                model.encode([prompt])
            world.gather(torch.zeros(1, device=world.device))  # until all have written theirs
            model.release()

    def check(module: nn.Module) -> str:
        error = model.check(module, (train * 2)[:2])
        return f"no adapter for {model.pipeline}: replayed as it was recorded, its velocities within {error:.1g}"

    return replace(
        job,
        train_prompts=train,
        heldout_prompts=heldout,
        rewards={"jpeg": jpeg_compressibility},
        load=model.with_weights,
        prepare=prepare,
        check=check if is_recorded(model) else None,
    )


def opened(
    name: str, config: PipelineConfig, *, steps: int, guidance: Guidance, compute: torch.dtype = torch.float32
) -> Job:
    """Return the job of a pipeline without prompts, rewards and evaluators.

    Args:
        name, config: as `pipeline`.
        steps, guidance, compute: which a pipeline without an adapter is opened with.

    Raises:
        UsageError: as `pipeline`.
    """
    from fluvial.models.pipelines.folder import local_folder
    from fluvial.models.pipelines.open import has_adapter, open_model
    from fluvial.models.replay.any_pipeline import AnyPipeline

    half = config.frozen == "bfloat16" or (config.frozen == "auto" and torch.cuda.is_available())
    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "cache": config.text_cache, "trust_remote_code": config.trust_remote_code}
    size: dict[str, Any] = {"height": config.height, "width": config.width, "frames": config.frames}
    try:
        folder = local_folder(name, trust_remote_code=config.trust_remote_code)
        model: Any
        if not has_adapter(folder):
            options |= {"steps": steps, "scale": guidance.scale, "negative": guidance.negative, "compute": compute}
            model = AnyPipeline(folder, **size, call=dict(map(_named_value, config.call)), **options)
        elif config.call:
            raise ValueError("pipeline.call is set, and there is an adapter, which calls no pipeline: leave it as it is")
        else:
            model = open_model(folder, **options)
        shape = model.latent_shape(**size)
    except (ValueError, OSError) as error:
        raise UsageError(f"--model {name}: {error}") from error
    return Job(model, shape, (), (), rewards={}, evaluators={})


def named(model: str, *, weights: Path | None = None, prompts: Path | None = None) -> Job:
    """Return the job of a built-in model.

    Args:
        model: its name.
        weights: folder of its weights; the shipped base by default.
        prompts: to train on.

    Raises:
        UsageError: there is no such model, or a prompt is none for it.
    """
    if model not in BUILT_IN:
        raise UsageError(
            f"--model {model}: there is no such model, expected {' or '.join(BUILT_IN)}, a folder, or an id on the Hub "
            "such as owner/name (fluvial models)"
        )
    return handwriting(weights=weights, prompts=prompts, unet=model == BUILT_IN[1])


def of_run(config: TrainConfig) -> Job:
    """Return the job of a run: of a built-in model, or of a pipeline by its folder or its id on the Hub.

    Raises:
        UsageError: there is no such model, or it cannot do what is asked.
    """
    if config.model in BUILT_IN or ("/" not in config.model and not Path(config.model).is_dir()):
        return named(config.model, weights=config.weights, prompts=config.prompts)
    rollout, device = config.rollout, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return pipeline(
        config.model, config.pipeline, prompts=config.prompts, steps=rollout.steps, guidance=rollout.guidance,
        compute=config.engine.compute_dtype(device),
    )  # fmt: skip


def build(job: Job, *, empty: bool = False) -> nn.Module:
    """Return a job's network with its weights, on the CPU, or `empty`, with parameters on the meta device.

    Raises:
        UsageError: the weights are missing, damaged or of another model.
    """
    try:
        return job.model.build(empty=empty)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the model cannot be loaded: {reason}") from error


def read_prompts(path: Path, model: DiffusionModel, *, heldout: Sequence[str]) -> tuple[str, ...]:
    """Return the prompts of a text file, one a line; blank lines are passed over.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is no prompt for the model or is held out for evaluation;
            it names file and line.
    """
    apart = frozenset(heldout)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts file {path} cannot be read: {reason}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if prompt := line.strip():
            try:
                model.check_prompt(prompt)
            except ValueError as error:
                raise UsageError(f"prompts file {path}, line {number}: {error}") from error
            if prompt in apart:
                raise UsageError(
                    f"prompts file {path}, line {number}: {prompt!r} is held out for evaluation, never trained on"
                )
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"prompts file {path} is empty, expected one prompt a line")
    return tuple(prompts)


def claim_preferences(folder: Path) -> None:
    """Make a folder for preferences, before they are made.

    Raises:
        UsageError: it holds preferences already, or cannot be made.
    """
    if (folder / PREFERENCES).exists():
        raise UsageError(f"{folder} holds preferences already: choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"preferences cannot be written to {folder}: {error.strerror}") from error


def write_preferences(folder: Path, chosen: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Write preferences to a folder: preferences.jsonl, a line {"prompt", "win", "lose"} each, and the images it names.

    Args:
        folder: made if it is not there.
        chosen: (prompt, preferred image, the other), images `[C, H, W]` in [0, 1].

    Raises:
        UsageError: the folder holds preferences already, or cannot be written.
    """
    from fluvial.models.images import as_image

    claim_preferences(folder)
    try:
        lines = []
        for number, (prompt, *both) in enumerate(chosen):
            names = [f"{number:06d}-{side}.png" for side in ("win", "lose")]
            for name, image in zip(names, both, strict=True):
                as_image(image, width=image.shape[-1], colour=len(image) > 1).save(folder / name)
            lines.append(json.dumps({"prompt": prompt, "win": names[0], "lose": names[1]}))
        (folder / PREFERENCES).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UsageError(f"preferences cannot be written to {folder}: {error.strerror}") from error


def read_preferences(folder: Path, job: Job) -> tuple[Preference, ...]:
    """Return the preferences of a folder, as clean samples of the job's model.

    Raises:
        UsageError: the file or a image is missing or no such thing, a line is no preference, or its prompt is held out.
    """
    if job.encode is None:
        raise UsageError(f"preferences of {folder} cannot be used: this job's model has no way from images to samples")
    path, apart, found = folder / PREFERENCES, frozenset(job.heldout_prompts), []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"preferences {path} cannot be read: {reason}") from error
    for number, line in enumerate(lines, start=1):
        where = f"preferences {path}, line {number}"
        try:
            record = json.loads(line)
            prompt, names = record["prompt"], [Path(record[side]) for side in ("win", "lose")]
            job.model.check_prompt(prompt)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f'{where}: expected {{"prompt": ..., "win": ..., "lose": ...}}: {error}') from error
        if prompt in apart:
            raise UsageError(f"{where}: {prompt!r} is held out for evaluation, never trained on")
        try:
            samples = job.encode(torch.stack([_image(folder / name) for name in names]))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{where}: its images cannot be used: {error}") from error
        if tuple(samples.shape[1:]) != job.shape:
            raise UsageError(f"{where}: its images give samples of {list(samples.shape[1:])}, expected {list(job.shape)}")
        found.append(Preference(prompt, *samples))
    if not found:
        raise UsageError(f"preferences {path} is empty, expected one preference a line")
    return tuple(found)


def _named_value(word: str) -> tuple[str, Any]:
    """Return what name=value says; the value is JSON, or else text."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _image(path: Path) -> Tensor:
    """Return a image file as `[C, H, W]` in [0, 1]."""
    with Image.open(path) as image:
        array = np.asarray(image if image.mode == "L" else image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
