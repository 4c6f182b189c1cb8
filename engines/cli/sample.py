"""`fluvial sample MODEL`: draw images of prompts into one PNG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.random import key
from fluvial.engines.cli.brief import SAMPLE, asks
from fluvial.engines.cli.eval_models import drawing_settings, open_model, source_of
from fluvial.engines.cli.listing import defaults, may_be_model
from fluvial.engines.cli.parse import check_pipeline, flags_in_errors, parse_config, parse_name
from fluvial.engines.data.prompt_sets import is_set
from fluvial.engines.data.prompt_table import PromptTable
from fluvial.engines.data.prompts import check_prompts, is_prompt_file, read_prompts
from fluvial.engines.data.records import Prompt, model_inputs, texts
from fluvial.engines.errors import UsageError
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import job as jobs
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.media import check_columns, list_media_columns
from fluvial.engines.run.jobs.pipeline import check_second_scale, is_adapter
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import add_adapter
from fluvial.engines.run.log import images
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate, on_device
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.runner import score
from fluvial.models import is_recorded
from fluvial.models.device import default_device
from fluvial.models.original.whole import pipeline_folder
from fluvial.models.pipelines.open import has_adapter


@dataclass(frozen=True)
class SampleConfig:
    """Draw images of prompts with a model, and with an adapter once more from the same noise.

    MODEL is a built-in model, a pipeline of diffusers (folder or id), `module:name`, the folder of a run or one of its
    checkpoints. A run and a checkpoint bring their steps, guidance and size.

    Args:
        prompts: Prompts to draw, or files of prompts, as for training. A word that ends in .txt, .jsonl, .json, .csv,
            .parquet or .toml names a file.
        out: PNG file to write. Of a video it shows the first, the middle and the last frame.
        weights: Folder of weights in place of the model's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, with the keys of diffusers, PEFT or kohya/ComfyUI, such as the `lora` of a run
            folder. Without one only the model itself draws.
        each: Number of images per prompt.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the noise, the same with and without the adapter.
        micro_batch: Number of samples per forward pass.
        guidance: Classifier-free guidance of every step.
        pipeline: Size of the images, and how a pipeline is opened.
    """

    prompts: tuple[str, ...] = defaults("").prompts
    out: Path = Path("sample.png")
    weights: Path | None = None
    lora: Path | None = None
    each: int = 4
    steps: int = 20
    seed: int = 0
    micro_batch: int = 4
    guidance: Guidance = field(default_factory=Guidance)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", each=BATCH, steps=STEPS, micro_batch=BATCH, seed=(0, 2**63 - 1))
        if sets := [prompt for prompt in self.prompts if is_set(prompt)]:
            raise UsageError(
                f"`prompts` holds the prompt set {sets[0]}, expected texts: see fluvial eval --prompts {sets[0]}"
            )
        if not self.prompts:
            raise UsageError("`prompts` is empty, expected at least one, such as 'a red fox' 'two cats'")


def run(args: list[str]) -> None:
    """Draw, and print where the image is."""
    if asks(args):
        parse_config(SampleConfig(), "fluvial sample MODEL_OR_RUN", args[:1], brief=SAMPLE)
    name = parse_name("sample", args, tuple(MODELS), "a model", fits=may_be_model)
    source = source_of(name)
    preset = defaults(name if source is None else source.config.model)
    base = SampleConfig(preset.prompts, steps=preset.steps, micro_batch=preset.micro_batch)
    if source is not None:
        base = replace(base, **drawing_settings(source.config))
    config = parse_config(base, f"fluvial sample {name}", args[1:], brief=SAMPLE)
    with flags_in_errors(config):
        out = sample(name, config)
    print(f"image: {out}")


def sample(name: str, config: SampleConfig) -> Path:
    """Draw with a model, without and with an adapter, and return the path of the image."""
    if config.out.suffix.lower() not in images.Image.registered_extensions():
        raise UsageError("out", config.out, "a name that ends in .png or another image format")
    check_pipeline(config.pipeline)
    files = tuple(filter(is_prompt_file, config.prompts))  # a missing one is refused before a checkpoint is read
    with open_model(name, weights=config.weights, lora=config.lora) as (base, weights):
        recorded = _find_recorded(base, config, files)
        job = jobs.open_to_sample(
            base, config.pipeline, steps=config.steps, guidance=config.guidance, weights=weights, prompts=recorded
        )
        if weights == config.weights:  # else it is a run's, whose rollouts may be guided
            check_second_scale(job.model, guided=config.guidance.scale != 1)
        media = list_media_columns(job.model, config.pipeline.media)
        prompts = [prompt for word in config.prompts for prompt in _parse_prompts(word, job, media)]
        check_columns(job.model, [*job.prompts[:1], *prompts], media)
        if is_recorded(model := cast(Any, job.model)):
            job = replace(job, model=model.adapt_to(model_inputs(prompts)))
        module = jobs.build(job).to(default_device()).eval()
        sheets = [_sheet(job, module, prompts, config, name)]
        if config.lora is not None:
            add_adapter(module, job, config.lora, field="lora")
            sheets.append(_sheet(job, module.to(default_device()), prompts, config, f"with {config.lora}"))
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        images.stack_images(sheets).save(config.out)
    except (OSError, ValueError) as error:  # ValueError: a format that Pillow cannot write
        raise UsageError("out", config.out, hint=f"it cannot be written, {error}") from error
    return config.out


def _find_recorded(model: str, config: SampleConfig, files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of prompts that a pipeline without an adapter is recorded on: it may need their images."""
    if not files or model in MODELS or is_adapter(model):
        return ()
    asked = config.pipeline
    folder = pipeline_folder(model, trust_remote_code=asked.trust_remote_code, settings=asked.settings)
    return () if has_adapter(folder) else files


def _parse_prompts(word: str, job: Job, media: Mapping[str, str]) -> PromptTable:
    """Return the prompts of a file, or the one prompt that a text is; a job of edits brings the images of its own."""
    check = job.model.check_prompt
    if is_prompt_file(word):
        return read_prompts(Path(word), check=check, media=media)
    known = {prompt.text: prompt for prompt in (*job.prompts, *job.heldout)}
    return check_prompts([("`prompts`", known.get(word, Prompt(word)))], check=check, heldout=())


def _sheet(job: Job, module: nn.Module, asked: Sequence[Prompt], config: SampleConfig, title: str) -> images.Image.Image:
    """Return samples of each prompt side by side, with their scores where the model comes with an evaluator."""
    model, prompts = job.model, [prompt for prompt in asked for _ in range(config.each)]
    schedule = on_device(model.schedule(config.steps, job.shape), default_device())
    tokens = TextLengths(model).of(config.guidance.texts(model, prompts))
    sampling = Sampling(job.shape, schedule, config.guidance, text_tokens=tokens)
    requests = Requests(prompts, range(len(prompts)), key(config.seed))
    chunks = generate(model, module, requests, sampling, micro_batch=config.micro_batch)
    drawn = torch.cat([chunk.images.cpu() for chunk in chunks])
    scores = score(job.evaluators["heldout"], drawn, prompts) if "heldout" in job.evaluators else None
    return images.draw_sheet(drawn, texts(prompts), scores, title=title, columns=config.each)
