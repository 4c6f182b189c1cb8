"""`fluvial preferences MODEL`: write pairs of samples, the best and the worst of each prompt, for `train dpo`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import at_least_one, console, flags_in_errors, named, one_size, parsed
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.rollout.generate import NO_GUIDANCE, Guidance
from fluvial.engines.train.config import PipelineConfig

if TYPE_CHECKING:
    from torch.nn import Module

    from fluvial.engines.train.job import Job

MAX_INVALID = 0.25  # largest share of the prompts that may be left out for want of a valid reward


@dataclass(frozen=True)
class PreferencesConfig:
    """Draw samples of training prompts, and write the best and the worst sample of each prompt, by a reward, to a folder.

    Args:
        out: Folder for preferences.jsonl and its images.
        weights: Folder of the model's weights. By default the shipped base weights.
        prompts: Number of prompts. A prompt whose samples all get the same reward gives no preference.
        group: Number of samples per prompt.
        rewards: Names of the job's rewards or functions of your own (module:name), each with or without =weight. By default
            the job's first reward.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the prompts and of the noise.
        micro_batch: Number of samples per forward pass.
    """

    out: Path
    weights: Path | None = None
    prompts: int = 400
    group: int = 8
    rewards: tuple[str, ...] = ()
    steps: int = 10
    seed: int = 0
    micro_batch: int = 128

    def __post_init__(self) -> None:
        at_least_one(prompts=self.prompts)
        _check_numbers(self)


@dataclass(frozen=True)
class PipelinePreferencesConfig:
    """Draw samples with a pipeline, and write the best and the worst sample of each prompt, by a reward, to a folder.

    Args:
        out: Folder for preferences.jsonl and its images.
        prompts: Files of prompts, as for training; held-out prompts are left out.
        count: Number of prompts that samples are drawn of; None takes each prompt once.
        group: Number of samples per prompt.
        rewards: Rewards, each with or without =weight: jpeg, or functions of your own (module:name).
        weights: Folder of weights in place of the pipeline's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, such as the `lora` of a run folder.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the order of the prompts and of the noise.
        micro_batch: Number of samples per forward pass.
        guidance: Classifier-free guidance of every step.
        pipeline: Size of the images, and how the pipeline is opened.
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
        if self.count is not None:
            at_least_one(count=self.count)
        _check_numbers(self)


def run(args: list[str]) -> None:
    """Write the folder, and print the command that trains on it.

    Raises:
        UsageError: the arguments are wrong, or the folder cannot be written.
    """
    name = named("preferences", args, tuple(BUILT_IN), "a model", fits=lambda word: "/" in word or Path(word).is_dir())
    program, folder = f"fluvial preferences {name}", Path("runs") / "preferences"
    if name in BUILT_IN:
        config = parsed(PreferencesConfig, lambda: PreferencesConfig(folder), program, args[1:])
        with flags_in_errors(config):
            count, asked, out = write(name, config), config.prompts, config.out
        given = {"weights": config.weights}
    else:
        wanted = parsed(PipelinePreferencesConfig, lambda: PipelinePreferencesConfig(folder), program, args[1:])
        with flags_in_errors(wanted):
            (count, asked), out = write_of_pipeline(name, wanted), wanted.out
        given = {"weights": wanted.weights, "lora": wanted.lora}
    start = "".join(f" --{flag} {path}" for flag, path in given.items() if path is not None)
    console().print(
        f"{count} preferences of {asked} prompts: {out}; train on them with\n"
        f"fluvial train dpo --model {name} --objective.preferences {out}{start}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def write(name: str, config: PreferencesConfig) -> int:
    """Draw and write the preferences of a built-in model, and return how many there are."""
    from fluvial.core.random import fold_in, key, uniform
    from fluvial.engines.data.preferences import claim_preferences
    from fluvial.engines.rollout.streams import Stream
    from fluvial.engines.train import job as jobs

    job = jobs.named(name, weights=config.weights)
    claim_preferences(config.out)
    draws = uniform(fold_in(key(config.seed), Stream.PREFERENCE_PROMPTS), (config.prompts,))
    places = (draws * len(job.prompts)).long().tolist()
    return _write(job, jobs.build(job), [job.prompts[place] for place in places], config, NO_GUIDANCE)


def write_of_pipeline(name: str, config: PipelinePreferencesConfig) -> tuple[int, int]:
    """Draw and write the preferences of a pipeline, and return how many there are, and of how many prompts."""
    import torch

    from fluvial.core.random import fold_in, key
    from fluvial.engines.data.order import PromptOrder
    from fluvial.engines.data.preferences import claim_preferences
    from fluvial.engines.rollout.streams import Stream
    from fluvial.engines.train import job as jobs
    from fluvial.engines.train.jobs.weights import add_adapter, with_base

    one_size(config.pipeline)
    job = jobs.pipeline(
        name, config.pipeline, prompts=config.prompts, steps=config.steps, guidance=config.guidance, compute=torch.float32
    )
    job = with_base(job, config.weights)
    module = jobs.build(job)
    if config.lora is not None:
        add_adapter(module, job, config.lora, field="--lora")
    claim_preferences(config.out)
    count = len(job.prompts) if config.count is None else config.count
    order = PromptOrder(job.prompts, fold_in(key(config.seed), Stream.PREFERENCE_PROMPTS), job.source_weights)
    return _write(job, module, [job.prompts[place] for place in order.places(0, count)], config, config.guidance), count


def _write(
    job: "Job",
    module: "Module",
    asked: Sequence[str],
    config: PreferencesConfig | PipelinePreferencesConfig,
    guidance: Guidance,
) -> int:
    """Draw a group of samples of each prompt, write the best and the worst of each, and return how many pairs there are.

    Of each group only the two are kept, so that memory does not grow with the number of samples.
    """
    import torch

    from fluvial.core.dpo import best_and_worst
    from fluvial.core.random import fold_in, key
    from fluvial.engines.data.preferences import write_preferences
    from fluvial.engines.rewards.invalid import kept_samples
    from fluvial.engines.rewards.registry import select
    from fluvial.engines.rewards.runner import RewardRunners
    from fluvial.engines.rewards.signature import Samples
    from fluvial.engines.rewards.warm_up import warm_up
    from fluvial.engines.rollout.generate import Requests, Sampling, generate, on_device
    from fluvial.engines.rollout.streams import Stream
    from fluvial.engines.rollout.text import TextLengths

    weighted = select(job.rewards, config.rewards)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule = on_device(job.model.schedule(config.steps, job.shape), device)
    tokens = TextLengths(job.model).of(guidance.texts(job.model, asked))
    sampling = Sampling(job.shape, schedule, guidance, text_tokens=tokens)
    module, root, group = module.to(device).eval(), fold_in(key(config.seed), Stream.PREFERENCE_SAMPLES), config.group
    together, pairs = max(config.micro_batch // group, 1), list[Any]()
    left_out, problems, runners = 0, list[str](), RewardRunners(weighted, group=group)
    try:
        with torch.no_grad():
            latents = torch.zeros(1, *job.shape, device=device)
            warm_up(runners, Samples(job.model.decode(latents), asked[:1], latents), count=config.micro_batch, group=group)
        for first in range(0, len(asked), together):
            prompts = [prompt for prompt in asked[first : first + together] for _ in range(group)]
            requests = Requests(prompts, range(first * group, first * group + len(prompts)), root)
            images = []
            for chunk in generate(job.model, module, requests, sampling, micro_batch=config.micro_batch):
                runners.submit(chunk.images, chunk.prompts, chunk.trajectory.final)
                images.append(chunk.images.cpu())
            drawn, scored = torch.cat(images), runners.collect()
            kept = kept_samples(scored.scores, group)
            problems += scored.problems[:1]
            left_out += int((~kept).sum()) // group
            if left_out > MAX_INVALID * len(asked):
                raise RunError(f"{problems[0]}; {left_out} of the {len(asked)} prompts have no valid reward so far")
            number = torch.nonzero(kept).flatten()
            found = best_and_worst(scored.scores[kept] @ runners.weights, number // group)
            for place in torch.nonzero(found.valid).flatten().tolist():
                win, lose = int(number[found.win[place]]), int(number[found.lose[place]])
                pairs.append((prompts[win], drawn[win].clone(), drawn[lose].clone()))
    finally:
        runners.close()
    if problems:
        line = f"{problems[0]}; {left_out} of the {len(asked)} prompts have no valid reward and are left out"
        console().print(line, highlight=False, soft_wrap=True)
    write_preferences(config.out, pairs)
    return len(pairs)


def _check_numbers(config: PreferencesConfig | PipelinePreferencesConfig) -> None:
    at_least_one(steps=config.steps, micro_batch=config.micro_batch)
    if config.group < 2:
        raise UsageError(f"group is {config.group}, expected at least 2: a preference is between two samples")
    if not 0 <= config.seed < 2**63:
        raise UsageError(f"seed is {config.seed}, expected 0 <= seed < 2^63")
