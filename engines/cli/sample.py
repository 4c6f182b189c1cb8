"""`fluvial sample MODEL`: draw images of prompts into one PNG, by a built-in model or by a pipeline."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import at_least_one, console, flags_in_errors, named, one_size, parsed
from fluvial.engines.errors import UsageError
from fluvial.engines.report import images
from fluvial.engines.rewards.runner import score
from fluvial.engines.rollout.generate import NO_GUIDANCE, Guidance, Requests, Sampling, generate, on_device
from fluvial.engines.rollout.text import TextLengths
from fluvial.engines.train import job as jobs
from fluvial.engines.train.config import PipelineConfig
from fluvial.engines.train.jobs.weights import add_adapter
from fluvial.models import DiffusionModel


@dataclass(frozen=True)
class SampleConfig:
    """Draw images of prompts with a built-in model.

    Args:
        prompts: Prompts to draw, 4-digit codes.
        out: PNG file to write.
        weights: Folder of the weights, such as the `weights` of a run folder. By default the shipped base weights.
        each: Number of images per prompt.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the noise.
        micro_batch: Number of samples per forward pass.
    """

    prompts: tuple[str, ...] = ("0427", "1999", "3141", "8650")
    out: Path = Path("sample.png")
    weights: Path | None = None
    each: int = 4
    steps: int = 10
    seed: int = 0
    micro_batch: int = 64

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.prompts:
            raise UsageError("prompts is empty, expected at least one, such as 0427 1999")


@dataclass(frozen=True)
class PipelineSampleConfig:
    """Draw images of prompts with a pipeline from a folder or the Hub, and with an adapter once more from the same noise.

    Args:
        prompts: Prompts to draw.
        out: PNG file to write. Of a video it shows the first, the middle and the last frame.
        lora: File or folder of an adapter, with the keys of diffusers, PEFT or kohya/ComfyUI, such as the `lora` of a run
            folder. Without one only the pipeline itself draws.
        each: Number of images per prompt.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the noise, the same with and without the adapter.
        micro_batch: Number of samples per forward pass.
        guidance: Classifier-free guidance of every step.
        pipeline: Size of the images, and how the pipeline is opened.
    """

    prompts: tuple[str, ...] = ("a red fox in the snow", "a shop sign that reads OPEN")
    out: Path = Path("sample.png")
    lora: Path | None = None
    each: int = 4
    steps: int = 20
    seed: int = 0
    micro_batch: int = 4
    guidance: Guidance = field(default_factory=Guidance)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.prompts:
            raise UsageError("prompts is empty, expected at least one, such as 'a red fox' 'two cats'")


def run(args: list[str]) -> None:
    """Draw, and print where the image is.

    Raises:
        UsageError: the arguments are wrong.
    """
    name = named("sample", args, tuple(BUILT_IN), "a model", fits=_may_be_pipeline)
    program = f"fluvial sample {name}"
    if name in BUILT_IN:
        config = parsed(SampleConfig, SampleConfig, program, args[1:])
        with flags_in_errors(config):
            out = sample(name, config)
    else:
        asked = parsed(PipelineSampleConfig, PipelineSampleConfig, program, args[1:])
        with flags_in_errors(asked):
            out = sample_pipeline(name, asked)
    console().print(f"image: {out}", highlight=False, soft_wrap=True)


def _may_be_pipeline(name: str) -> bool:
    """Return whether a name is that of a folder, may be that of a model on the Hub, or is a person's own module:name."""
    return "/" in name or ":" in name or Path(name).is_dir()


def sample(name: str, config: SampleConfig) -> Path:
    """Draw with a built-in model, captioned by a recogniser that training never sees, and return the path of the image.

    Raises:
        UsageError: a prompt does not fit the model, its weights cannot be loaded, or the image cannot be written.
    """
    _check_out(config.out)
    job = jobs.named(name, weights=config.weights)
    prompts = [prompt for prompt in config.prompts for _ in range(config.each)]
    module = jobs.build(job).to(_device()).eval()
    _check(job.model, config.prompts)
    drawn = _draw(job.model, module, prompts, job.shape, config.steps, config.seed, config.micro_batch, NO_GUIDANCE)
    _save(
        [images.sheet_of(drawn, prompts, score(job.evaluators["heldout"], drawn, prompts), columns=config.each)], config.out
    )
    return config.out


def sample_pipeline(name: str, config: PipelineSampleConfig) -> Path:
    """Draw with a pipeline, without and with an adapter, and return the path of the image.

    Raises:
        UsageError: as `sample`, or the adapter cannot be loaded.
    """
    _check_out(config.out)
    one_size(config.pipeline)
    job = jobs.opened(name, config.pipeline, steps=config.steps, guidance=config.guidance)
    _check(job.model, config.prompts)
    prompts = [prompt for prompt in config.prompts for _ in range(config.each)]
    module = jobs.build(job).to(_device()).eval()
    numbers = (job.shape, config.steps, config.seed, config.micro_batch, config.guidance)
    sheets = [images.sheet_of(_draw(job.model, module, prompts, *numbers), prompts, title=name, columns=config.each)]
    if config.lora is not None:
        add_adapter(module, job, config.lora, field="--lora")
        module.to(_device())
        after = _draw(job.model, module, prompts, *numbers)
        sheets.append(images.sheet_of(after, prompts, title=f"with {config.lora}", columns=config.each))
    _save(sheets, config.out)
    return config.out


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in images.Image.registered_extensions():
        raise UsageError(f"--out {out} cannot be written: {out.suffix or 'no ending'} is not an image format, expected .png")


def _check_numbers(config: SampleConfig | PipelineSampleConfig) -> None:
    at_least_one(each=config.each, steps=config.steps, micro_batch=config.micro_batch)
    if not 0 <= config.seed < 2**63:
        raise UsageError(f"seed is {config.seed}, expected 0 <= seed < 2^63")


def _check(model: DiffusionModel, prompts: tuple[str, ...]) -> None:
    for prompt in prompts:
        try:
            model.check_prompt(prompt)
        except ValueError as error:
            raise UsageError(f"--prompts: {error}") from error


def _draw(
    model: DiffusionModel, module: nn.Module, prompts: list[str], shape: tuple[int, ...], steps: int, seed: int,
    micro_batch: int, guidance: Guidance,
) -> Tensor:  # fmt: skip
    tokens = TextLengths(model).of(guidance.texts(model, prompts))
    sampling = Sampling(shape, on_device(model.schedule(steps, shape), _device()), guidance, text_tokens=tokens)
    chunks = generate(model, module, Requests(prompts, range(len(prompts)), key(seed)), sampling, micro_batch=micro_batch)
    return torch.cat([chunk.images.cpu() for chunk in chunks])


def _save(sheets: list[images.Image.Image], out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        images.stacked(sheets).save(out)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no image format
        raise UsageError(f"--out {out} cannot be written: {error}") from error
