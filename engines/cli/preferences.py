"""`fluvial preferences MODEL`: write pairs of samples, the best and the worst of each prompt, for `train dpo`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.dpo import best_and_worst
from fluvial.core.random import fold_in, key
from fluvial.engines.cli.brief import PREFERENCES, asks
from fluvial.engines.cli.eval_models import drawing_settings, open_model, source_of
from fluvial.engines.cli.listing import defaults, may_be_model
from fluvial.engines.cli.parse import check_pipeline, flags_in_errors, parse_config, parse_name
from fluvial.engines.data.order import PromptOrder
from fluvial.engines.data.preferences import claim_preferences, write_preferences
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import job as jobs
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.base import has_frames
from fluvial.engines.run.jobs.pipeline import check_second_scale
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import add_adapter
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate, on_device
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.advantages import weigh_rewards
from fluvial.engines.scoring.gather import find_kept_samples
from fluvial.engines.scoring.registry import select
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.scoring.signature import Samples
from fluvial.engines.scoring.warm_up import warm_up
from fluvial.engines.streams import Stream
from fluvial.models import decode_samples
from fluvial.models.device import default_device

MAX_INVALID = 0.25  # largest share of the prompts that may be left out for want of a valid reward


@dataclass(frozen=True)
class PreferencesConfig:
    """Draw samples with a model, and write the best and the worst sample of each prompt, by a reward, to a folder.

    MODEL is what `fluvial sample` takes. A run and a checkpoint bring their prompts, rewards, steps, guidance and size.

    Args:
        out: Folder for preferences.jsonl and its images.
        prompts: Files of prompts, as for training; held-out prompts are left out. A built-in model has prompts of its own.
        count: Number of prompts that samples are drawn of; None takes each prompt once. A prompt whose samples all get the
            same reward gives no preference.
        group: Number of samples per prompt.
        rewards: Rewards, each with or without =weight: names, or functions of your own (module:name). By default the first
            of the built-in model; a pipeline has none.
        weights: Folder of weights in place of the model's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, such as the `lora` of a run folder.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the order of the prompts and of the noise.
        micro_batch: Number of samples per forward pass.
        guidance: Classifier-free guidance of every step.
        pipeline: Size of the images, and how a pipeline is opened.
    """

    out: Path
    prompts: tuple[str, ...] = ()
    count: int | None = None
    group: int = 8
    rewards: tuple[str, ...] = ()
    weights: Path | None = None
    lora: Path | None = None
    steps: int = 20
    seed: int = 0
    micro_batch: int = 4
    guidance: Guidance = field(default_factory=Guidance)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", steps=STEPS, micro_batch=BATCH, count=BATCH, seed=(0, 2**63 - 1))
        if self.group < 2:
            raise UsageError("group", self.group, "at least 2", "a preference is between two samples")


def run(args: list[str]) -> None:
    """Write the folder, and print the command that trains on it."""
    if asks(args):
        parse_config(
            PreferencesConfig(Path("runs") / "preferences"), "fluvial preferences MODEL_OR_RUN", args[:1], brief=PREFERENCES
        )
    name = parse_name("preferences", args, tuple(MODELS), "a model", fits=may_be_model)
    source, folder = source_of(name), Path("runs") / "preferences"
    preset = defaults(name if source is None else source.config.model)
    base = PreferencesConfig(folder, count=preset.samples, steps=preset.steps, micro_batch=preset.micro_batch)
    if source is not None:
        run = source.config
        base = replace(base, prompts=run.prompts, rewards=run.rewards, **drawing_settings(run))
    config = parse_config(base, f"fluvial preferences {name}", args[1:], brief=PREFERENCES)
    with flags_in_errors(config):
        count, asked = write(name, config)
    flags = {"weights": config.weights, "lora": config.lora}
    start = "".join(f" --{flag} {path}" for flag, path in flags.items() if path is not None)
    print(f"{count} preferences of {asked} prompts: {config.out}; train on them with")
    print(f"fluvial train dpo --model {name} --preferences {config.out}{start}")


def write(name: str, config: PreferencesConfig) -> tuple[int, int]:
    """Draw and write the preferences of a model, and return how many there are, and of how many prompts."""
    check_pipeline(config.pipeline)
    with open_model(name, weights=config.weights, lora=config.lora) as (model, weights):
        if config.prompts:
            jobs.check_has_reward(model, config.rewards)
        job = jobs.open_to_train(
            model, config.pipeline, steps=config.steps, guidance=config.guidance, weights=weights, prompts=config.prompts
        )
        if weights == config.weights:  # else it is a run's, whose rollouts may be guided
            check_second_scale(job.model, guided=config.guidance.scale != 1)
        module = jobs.build(job)
        if config.lora is not None:
            add_adapter(module, job, config.lora, field="lora")
        claim_preferences(config.out)
        count = len(job.prompts) if config.count is None else config.count
        order = PromptOrder(job.prompts, fold_in(key(config.seed), Stream.PREFERENCE_PROMPTS), job.source_weights)
        return _write(job, module, [job.prompts[place] for place in order.places(0, count)], config), count


def _write(job: Job, module: nn.Module, asked: Sequence[Prompt], config: PreferencesConfig) -> int:
    """Draw a group of samples of each prompt, write the best and the worst of each, and return how many pairs there are.

    Of each group only the two are kept, so that memory does not grow with the number of samples.
    """
    weighted = select(job.rewards, config.rewards, videos=has_frames(config.pipeline.frames, job.shape))
    device = default_device()
    schedule = on_device(job.model.schedule(config.steps, job.shape), device)
    tokens = TextLengths(job.model).of(config.guidance.texts(job.model, asked))
    sampling = Sampling(job.shape, schedule, config.guidance, text_tokens=tokens)
    module, root, group = module.to(device).eval(), fold_in(key(config.seed), Stream.PREFERENCE_SAMPLES), config.group
    together, pairs = max(config.micro_batch // group, 1), list[Any]()
    left_out, problems, runners = 0, list[str](), RewardRunners(weighted, group=group)
    try:
        with torch.no_grad():
            latents = torch.zeros(1, *job.shape, device=device)
            blank = Samples(decode_samples(job.model, latents, model_inputs(asked[:1])), asked[:1], latents)
            warm_up(runners.runners, blank, count=config.micro_batch, group=group)
        for first in range(0, len(asked), together):
            prompts = [prompt for prompt in asked[first : first + together] for _ in range(group)]
            requests = Requests(prompts, range(first * group, first * group + len(prompts)), root)
            images = []
            for chunk in generate(job.model, module, requests, sampling, micro_batch=config.micro_batch):
                runners.submit(chunk.images, chunk.prompts, chunk.trajectory.final)
                images.append(chunk.images.cpu())
            drawn, scored = torch.cat(images), runners.collect()
            kept = find_kept_samples(scored.scores, group)
            problems += scored.problems[:1]
            left_out += int((~kept).sum()) // group
            if left_out > MAX_INVALID * len(asked):
                raise RunError(f"{problems[0]}; {left_out} of the {len(asked)} prompts have no valid reward so far")
            number = torch.nonzero(kept).flatten()
            extremes = best_and_worst(weigh_rewards(scored.scores[kept], runners.weights), number // group)
            for place in torch.nonzero(extremes.valid).flatten().tolist():
                win, lose = int(number[extremes.win[place]]), int(number[extremes.lose[place]])
                pairs.append((prompts[win].text, drawn[win].clone(), drawn[lose].clone()))
    finally:
        runners.close()
    if problems:
        print(f"{problems[0]}; {left_out} of the {len(asked)} prompts have no valid reward and are left out")
    write_preferences(config.out, pairs)
    return len(pairs)
