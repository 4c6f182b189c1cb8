"""`fluvial preferences MODEL`: write pairs of samples, the best and the worst of each prompt, for `train dpo`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluvial.core.checks import BATCH, STEPS, check_fields
from fluvial.core.dpo import best_and_worst
from fluvial.core.random import fold_in, key
from fluvial.engines.cli.brief import PREFERENCES, asks_for_help
from fluvial.engines.cli.eval_models import find_source, open_model, read_drawing_settings
from fluvial.engines.cli.listing import choose_defaults, may_be_model
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
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate, move_schedule
from fluvial.engines.sampling.text import TextLengths
from fluvial.engines.scoring.advantages import weigh_rewards
from fluvial.engines.scoring.gather import find_kept_samples
from fluvial.engines.scoring.registry import select
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.scoring.signature import Samples
from fluvial.engines.scoring.warm_up import warm_up
from fluvial.engines.streams import Stream
from fluvial.models import decode_samples
from fluvial.models.device import find_default_device

MAX_INVALID = 0.25  # largest fraction of the prompts that may lack a valid reward


@dataclass(frozen=True)
class PreferencesConfig:
    """Generate samples with a model, and write the best and the worst sample of each prompt, by a reward, to a folder.

    MODEL is as in `fluvial sample`. Runs and checkpoints bring their prompts, rewards, steps, guidance and size.

    Args:
        out: Folder for preferences.jsonl and its images.
        prompts: Files of prompts, as for training; held-out prompts are left out. Built-in models have their own prompts.
        count: Number of prompts to sample; None takes each prompt once. A prompt whose samples all get the same reward
            gives no preference.
        group: Number of samples per prompt.
        rewards: Rewards, each with or without =weight: names, or your own functions (module:name). By default the first
            reward of the built-in model; a pipeline has none.
        weights: Folder of weights instead of the model's own, such as the `weights` of a run folder.
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
    if asks_for_help(args):
        parse_config(
            PreferencesConfig(Path("runs") / "preferences"), "fluvial preferences MODEL_OR_RUN", args[:1], brief=PREFERENCES
        )
    name = parse_name("preferences", args, tuple(MODELS), "a model", fits=may_be_model)
    source, folder = find_source(name), Path("runs") / "preferences"
    preset = choose_defaults(name if source is None else source.config.model)
    base = PreferencesConfig(folder, count=preset.samples, steps=preset.steps, micro_batch=preset.micro_batch)
    if source is not None:
        run = source.config
        base = replace(base, prompts=run.prompts, rewards=run.rewards, **read_drawing_settings(run))
    config = parse_config(base, f"fluvial preferences {name}", args[1:], brief=PREFERENCES)
    with flags_in_errors(config):
        pairs, prompts = write(name, config)
    model, flags = name, {"weights": config.weights, "lora": config.lora}
    print(f"{pairs} preferences of {prompts} prompts: {config.out}; train on them with")
    if source is not None and source.checkpoint is not None:  # training starts from exported weights
        model, flags = source.config.model, {"weights": config.out / "weights"}
        average = ["--ema"] if source.config.evaluation.average and source.config.optimizer.ema_decay > 0 else []
        export = ["fluvial", "export", source.checkpoint, "--as", "merged", *average, "--out", f"{flags['weights']}"]
        print(f"{shlex.join(export)} &&")
    start = [word for flag, path in flags.items() if path is not None for word in (f"--{flag}", str(path))]
    print(shlex.join(["fluvial", "train", "dpo", "--model", model, "--preferences", str(config.out), *start]))


def write(name: str, config: PreferencesConfig) -> tuple[int, int]:
    """Generate and write the preferences of a model, and return the numbers of preferences and of prompts."""
    check_pipeline(config.pipeline)
    with open_model(name, weights=config.weights, lora=config.lora) as (model, weights):
        if config.prompts:
            jobs.check_has_reward(model, config.rewards)
        job = jobs.open_to_train(
            model, config.pipeline, steps=config.steps, guidance=config.guidance, weights=weights, prompts=config.prompts
        )
        if weights == config.weights:  # not the weights of a run, whose rollouts may be guided
            check_second_scale(job.model, guided=config.guidance.scale != 1)
        module = jobs.build(job)
        if config.lora is not None:
            add_adapter(module, job, config.lora, field="lora")
        claim_preferences(config.out)
        count = len(job.prompts) if config.count is None else config.count
        order = PromptOrder(job.prompts, fold_in(key(config.seed), Stream.PREFERENCE_PROMPTS), job.source_weights)
        return _write(job, module, [job.prompts[number] for number in order.take(0, count)], config), count


def _write(job: Job, module: nn.Module, prompts: Sequence[Prompt], config: PreferencesConfig) -> int:
    """Generate a group of samples per prompt, write the best and the worst of each, and return the number of pairs.

    Other samples are dropped, so memory does not grow with their number.
    """
    weighted = select(job.rewards, config.rewards, videos=has_frames(config.pipeline.frames, job.shape))
    device = find_default_device()
    schedule = move_schedule(job.model.schedule(config.steps, job.shape), device)
    tokens = TextLengths(job.model).of(config.guidance.list_texts(job.model, prompts))
    sampling = Sampling(job.shape, schedule, config.guidance, text_tokens=tokens)
    module, root, group = module.to(device).eval(), fold_in(key(config.seed), Stream.PREFERENCE_SAMPLES), config.group
    together, pairs = max(config.micro_batch // group, 1), list[Any]()
    left_out, problems, runners = 0, list[str](), RewardRunners(weighted, group=group)
    try:
        with torch.no_grad():
            latents = torch.zeros(1, *job.shape, device=device)
            blank = Samples(decode_samples(job.model, latents, model_inputs(prompts[:1])), prompts[:1], latents)
            warm_up(runners.runners, blank, count=config.micro_batch, group=group)
        for first in range(0, len(prompts), together):
            repeated = [prompt for prompt in prompts[first : first + together] for _ in range(group)]
            requests = Requests(repeated, range(first * group, first * group + len(repeated)), root)
            chunks = []
            for chunk in generate(job.model, module, requests, sampling, micro_batch=config.micro_batch):
                runners.submit(chunk.images, chunk.prompts, chunk.trajectory.final)
                chunks.append(chunk.images.cpu())
            images, scored = torch.cat(chunks), runners.collect()
            kept = find_kept_samples(scored.scores, group)
            problems += scored.problems[:1]
            left_out += int((~kept).sum()) // group
            if left_out > MAX_INVALID * len(prompts):
                raise RunError(f"{problems[0]}; {left_out} of the {len(prompts)} prompts have no valid reward so far")
            numbers = torch.nonzero(kept).flatten()
            extremes = best_and_worst(weigh_rewards(scored.scores[kept], runners.weights), numbers // group)
            for index in torch.nonzero(extremes.valid).flatten().tolist():
                win, lose = int(numbers[extremes.win[index]]), int(numbers[extremes.lose[index]])
                pairs.append((repeated[win].text, images[win].clone(), images[lose].clone()))
    finally:
        runners.close()
    if problems:
        print(f"{problems[0]}; {left_out} of the {len(prompts)} prompts have no valid reward and are left out")
    write_preferences(config.out, pairs)
    return len(pairs)
