"""Images of prompts in one PNG: of the built-in models, and of pipelines before and after training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.core.checks import check_number
from fluvial.core.random import key
from fluvial.engines.errors import UsageError
from fluvial.engines.fsdp.export import LORA
from fluvial.engines.report import images
from fluvial.engines.rollout.generate import NO_GUIDANCE, Guidance, generate, on_device
from fluvial.engines.train import job as jobs
from fluvial.engines.train.config import PipelineConfig
from fluvial.models import DiffusionModel


@dataclass(frozen=True)
class SampleConfig:
    """Draw images of prompts.

    Args:
        prompts: what to draw.
        out: PNG to write.
        weights: folder of the weights, e.g. the `weights` of a run folder; the shipped base by default.
        each: images a prompt.
        steps: of the schedule.
        seed: of the noise.
        micro_batch: samples a forward pass.
    """

    prompts: tuple[str, ...] = ("0427", "1999", "3141", "8650")
    out: Path = Path("sample.png")
    weights: Path | None = None
    each: int = 4
    steps: int = 10
    seed: int = 0
    micro_batch: int = 64

    def __post_init__(self) -> None:
        for name in ("each", "steps", "micro_batch"):
            check_number("sample", name, getattr(self, name), low=1)
        if not self.prompts:
            raise UsageError("no prompt is given: --prompts 0427 1999")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}, expected 0 <= seed < 2^63")


@dataclass(frozen=True)
class PipelineSampleConfig:
    """Draw images of prompts by a pipeline from a folder or the Hub, with an adapter below those without it.

    Args:
        prompts: what to draw.
        out: PNG to write; of videos it shows the first, the middle and the last frame.
        lora: folder of an adapter, the `lora` of a run folder; without one only the model itself draws.
        each: images a prompt.
        steps: of the schedule.
        seed: of the noise, the same with and without the adapter.
        micro_batch: samples a forward pass.
        guidance: of every step.
        pipeline: size of the images, and the rest that a model is asked for.
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
        for name in ("each", "steps", "micro_batch"):
            check_number("sample", name, getattr(self, name), low=1)
        check_number("sample", "seed", self.seed, low=0, high=2**63 - 1)
        if not self.prompts:
            raise UsageError("no prompt is given: --prompts 'a red fox' 'two cats'")


def sample(name: str, config: SampleConfig) -> str:
    """Draw with a built-in model, captioned with what the recogniser that training never sees says, and return where it is.

    Raises:
        UsageError: a prompt is none for the model, its weights cannot be loaded, or the image cannot be written.
    """
    _check_out(config.out)
    job = jobs.named(name, weights=config.weights)
    prompts = [prompt for prompt in config.prompts for _ in range(config.each)]
    module = jobs.build(job).to(_device()).eval()
    _check(job.model, config.prompts)
    drawn = _draw(job.model, module, prompts, job.shape, config.steps, config.seed, config.micro_batch, NO_GUIDANCE)
    _save([images.sheet_of(drawn, prompts, job.evaluators["heldout"](drawn, prompts), columns=config.each)], config.out)
    return f"image: {config.out}"


def sample_pipeline(name: str, config: PipelineSampleConfig) -> str:
    """Draw with a pipeline, without and with an adapter, and return where it is.

    Raises:
        UsageError: as `sample`, or the adapter cannot be loaded.
    """
    _check_out(config.out)
    job = jobs.opened(name, config.pipeline, steps=config.steps, guidance=config.guidance)
    _check(job.model, config.prompts)
    prompts = [prompt for prompt in config.prompts for _ in range(config.each)]
    module = jobs.build(job).to(_device()).eval()
    numbers = (job.shape, config.steps, config.seed, config.micro_batch, config.guidance)
    sheets = [images.sheet_of(_draw(job.model, module, prompts, *numbers), prompts, title=name, columns=config.each)]
    if config.lora is not None:
        parts = {name: config.lora / name for name in module} if isinstance(module, nn.ModuleDict) else {"": config.lora}
        try:
            for name, folder in parts.items():
                network: Any = module.get_submodule(name)
                network.load_lora_adapter(str(folder), prefix=job.model.part, weight_name=LORA)  # type: ignore[attr-defined]
        except (AttributeError, OSError, ValueError, RuntimeError) as error:
            raise UsageError(f"--lora {config.lora} cannot be loaded: {str(error).splitlines()[0]}") from error
        after = _draw(job.model, module, prompts, *numbers)
        sheets.append(images.sheet_of(after, prompts, title=f"with {config.lora}", columns=config.each))
    _save(sheets, config.out)
    return f"image: {config.out}"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in images.Image.registered_extensions():
        raise UsageError(f"--out {out} cannot be written: {out.suffix or 'no ending'} is no kind of image, expected .png")


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
    chunks = generate(
        model, module, prompts, range(len(prompts)), shape=shape,
        schedule=on_device(model.schedule(steps, shape), _device()), key=key(seed), micro_batch=micro_batch,
        guidance=guidance,
    )  # fmt: skip
    return torch.cat([chunk.images.cpu() for chunk in chunks])


def _save(sheets: list[images.Image.Image], out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        images.stacked(sheets).save(out)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no image format
        raise UsageError(f"--out {out} cannot be written: {error}") from error
