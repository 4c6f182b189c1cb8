"""`fluvial sample MODEL`: generate images of prompts into one PNG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.random import key
from fluvial.engines.cli.brief import SAMPLE, asks_for_help
from fluvial.engines.cli.eval_models import find_source, open_model, read_drawing_settings
from fluvial.engines.cli.listing import choose_defaults, may_be_model
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
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate, move_schedule
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.runner import score
from fluvial.models import is_recorded
from fluvial.models.device import find_default_device
from fluvial.models.original.whole import find_pipeline_folder
from fluvial.models.pipelines.open import has_adapter


@dataclass(frozen=True)
class SampleConfig:
    """Generate images of prompts with a model, and again with an adapter from the same noise.

    MODEL is a built-in model, a pipeline of diffusers (folder or id), `module:name`, the folder of a run or one of its
    checkpoints. Runs and checkpoints bring their steps, guidance and size.

    Args:
        prompts: Prompts, or files of prompts, as for training. A word that ends in .txt, .jsonl, .json, .csv, .parquet or
            .toml names a file.
        out: PNG file to write. A video is shown by its first, middle and last frame.
        weights: Folder of weights instead of the model's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, with the keys of diffusers, PEFT or kohya/ComfyUI, such as the `lora` of a run
            folder. None generates images with the model only.
        each: Number of images per prompt.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the noise, the same with and without the adapter.
        micro_batch: Number of samples per forward pass.
        guidance: Classifier-free guidance of every step.
        pipeline: Size of the images, and how a pipeline is opened.
    """

    prompts: tuple[str, ...] = choose_defaults("").prompts
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
                f"`prompts` holds the prompt set {sets[0]}, expected texts: use fluvial eval --prompts {sets[0]}"
            )
        if not self.prompts:
            raise UsageError("`prompts` is empty, expected at least one, such as 'a red fox' 'two cats'")


def run(args: list[str]) -> None:
    """Generate the image, and print its path."""
    if asks_for_help(args):
        parse_config(SampleConfig(), "fluvial sample MODEL_OR_RUN", args[:1], brief=SAMPLE)
    name = parse_name("sample", args, tuple(MODELS), "a model", fits=may_be_model)
    source = find_source(name)
    preset = choose_defaults(name if source is None else source.config.model)
    base = SampleConfig(preset.prompts, steps=preset.steps, micro_batch=preset.micro_batch)
    if source is not None:
        base = replace(base, **read_drawing_settings(source.config))
    config = parse_config(base, f"fluvial sample {name}", args[1:], brief=SAMPLE)
    with flags_in_errors(config):
        out = sample(name, config)
    print(f"image: {out}")


def sample(name: str, config: SampleConfig) -> Path:
    """Generate samples with a model, without and with an adapter, and return the path of the image."""
    if config.out.suffix.lower() not in images.Image.registered_extensions():
        raise UsageError("out", config.out, "a name that ends in .png or another image format")
    check_pipeline(config.pipeline)
    files = tuple(filter(is_prompt_file, config.prompts))  # a missing file is an error before a checkpoint is read
    with open_model(name, weights=config.weights, lora=config.lora) as (base, weights):
        recorded = _find_recorded(base, config, files)
        job = jobs.open_to_sample(
            base, config.pipeline, steps=config.steps, guidance=config.guidance, weights=weights, prompts=recorded
        )
        if weights == config.weights:  # not the weights of a run, whose rollouts may be guided
            check_second_scale(job.model, guided=config.guidance.scale != 1)
        media = list_media_columns(job.model, config.pipeline.media)
        prompts = [prompt for word in config.prompts for prompt in _parse_prompts(word, job, media)]
        check_columns(job.model, [*job.prompts[:1], *prompts], media)
        if is_recorded(model := cast(Any, job.model)):
            job = replace(job, model=model.adapt_to(model_inputs(prompts)))
        module = jobs.build(job).to(find_default_device()).eval()
        sheets = [_draw_sheet(job, module, prompts, config, name)]
        if config.lora is not None:
            add_adapter(module, job, config.lora, field="lora")
            sheets.append(_draw_sheet(job, module.to(find_default_device()), prompts, config, f"with {config.lora}"))
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        images.stack_images(sheets).save(config.out)
    except (OSError, ValueError) as error:  # ValueError: a format that Pillow cannot write
        raise UsageError("out", config.out, hint=f"it cannot be written, {error}") from error
    return config.out


def _find_recorded(model: str, config: SampleConfig, files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of prompts to record a pipeline without an adapter on: it may need their images."""
    if not files or model in MODELS or is_adapter(model):
        return ()
    pipeline = config.pipeline
    folder = find_pipeline_folder(model, trust_remote_code=pipeline.trust_remote_code, settings=pipeline.settings)
    return () if has_adapter(folder) else files


def _parse_prompts(word: str, job: Job, media: Mapping[str, str]) -> PromptTable:
    """Return the prompts of a file, or a text as one prompt; a prompt of the job brings its image."""
    check = job.model.check_prompt
    if is_prompt_file(word):
        return read_prompts(Path(word), check=check, media=media)
    known = {prompt.text: prompt for prompt in (*job.prompts, *job.heldout)}
    return check_prompts([("`prompts`", known.get(word, Prompt(word)))], check=check, heldout=())


def _draw_sheet(
    job: Job, module: nn.Module, prompts: Sequence[Prompt], config: SampleConfig, title: str
) -> images.Image.Image:
    """Return a sheet of samples per prompt, with their scores if the model has an evaluator."""
    model, repeated = job.model, [prompt for prompt in prompts for _ in range(config.each)]
    schedule = move_schedule(model.schedule(config.steps, job.shape), find_default_device())
    tokens = TextLengths(model).of(config.guidance.list_texts(model, repeated))
    sampling = Sampling(job.shape, schedule, config.guidance, text_tokens=tokens)
    requests = Requests(repeated, range(len(repeated)), key(config.seed))
    chunks = generate(model, module, requests, sampling, micro_batch=config.micro_batch)
    samples = torch.cat([chunk.images.cpu() for chunk in chunks])
    scores = score(job.evaluators["heldout"], samples, repeated) if "heldout" in job.evaluators else None
    return images.draw_sheet(samples, texts(repeated), scores, title=title, columns=config.each)
