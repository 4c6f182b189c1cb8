"""Parts of a run: network, engine, policies, rewards and the rest, built from a configuration and a job."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.engines.data.preferences import EncodedPreferences, Preference, read_preference_records, read_preferences
from fluvial.engines.data.prompt_table import list_examples
from fluvial.engines.data.prompts import list_source_weights
from fluvial.engines.data.records import texts
from fluvial.engines.data.sizes import Size
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.files import digest_weights
from fluvial.engines.heads import add_head, list_head_parameters
from fluvial.engines.methods.table import with_checked_loss
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import job as jobs
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.declared import Base, BySource, Start, Teacher, Trained, find_heads
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.base import has_frames, has_one_size
from fluvial.engines.run.jobs.evaluated import build_evaluated, check_negatives, list_texts
from fluvial.engines.run.jobs.media import check_files, check_used
from fluvial.engines.run.jobs.weights import digest_adapter, read_adapter
from fluvial.engines.run.method import Images, Method, NoisedRows, Preferences
from fluvial.engines.run.monitoring.diagnostics import choose_watched
from fluvial.engines.run.networks import START, BuiltNetworks
from fluvial.engines.run.passes.micro_batch import Choice
from fluvial.engines.run.passes.probe import choose_micro_batch, choose_pairs, explain_fixed_pairs
from fluvial.engines.run.prefetch import RolloutPrefetcher
from fluvial.engines.run.rollouts import Memory
from fluvial.engines.run.run import Run
from fluvial.engines.run.sampler import RolloutSampler
from fluvial.engines.run.saving import describe_machine, read_micro_batch
from fluvial.engines.sampling.build import build_source
from fluvial.engines.sampling.config import Schedules, ScoutedGroups
from fluvial.engines.sampling.generate import Guidance, move_schedule
from fluvial.engines.sampling.noising import knows_its_schedule_only
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.source import Copy
from fluvial.engines.sampling.tail import NO_TAIL
from fluvial.engines.scoring.audio import with_audio
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.registry import check_records, check_rewards, select
from fluvial.engines.scoring.runner import RewardRunners
from fluvial.engines.scoring.signature import Samples, signature_of
from fluvial.engines.scoring.warm_up import warm_up, warm_up_evaluators
from fluvial.engines.waits import wait_for
from fluvial.models import LoraConfig, Prediction, Schedule, is_recorded, knows_any_level
from fluvial.models.device import has_values
from fluvial.models.digests import digest_tensors, join_digests
from fluvial.models.lora import LowRank, add_lora, find_lora_layers, map_adapter_names
from fluvial.models.lora_files import load_lora
from fluvial.models.prompt_layers import explain_no_keys
from fluvial.models.protocol import Weights
from fluvial.models.step_cache import GuidanceCache


class RunParts(NamedTuple):
    """Parts of a run."""

    run: Run  # interface for the method; its micro-batch is a number, and its job has evaluators
    ahead: RolloutPrefetcher | None  # collects batches ahead of the updates; None without `rollout.ahead`
    evaluated: Job  # job of the evaluations, perhaps with other prompts, evaluators and sizes
    schedule: Schedule  # with its timesteps on the device
    evaluation_schedule: Schedule  # perhaps with another number of steps
    choices: dict[str, Choice]  # micro-batch sizes chosen by trial, and why, by setting
    base: str  # fingerprint of the weights and adapters that training starts from


@collective
def build_parts(
    config: TrainConfig,
    job: Job,
    world: World,
    memory: Memory,
    *,
    stop: Callable[[], bool] = lambda: False,
    resume_from: Path | str | None = None,
) -> RunParts:
    """Build the parts of a run.

    Args:
        memory: state of the run between batches.
        stop: returns whether this rank was asked to stop.
        resume_from: checkpoint to continue from. An automatic micro-batch takes its size; automatic pairs per pass take its
            number if it was chosen on a machine like this one.

    Raises:
        UsageError: configuration and job do not fit together, or a part of the job cannot be used.
        RunError: a reward cannot score blank images.
    """
    with world.agreed():
        # Check the job before anything is computed.
        rewards, job = _select_rewards(config, job, world)
        job.check_prompts()
        _check_sources(config.method, job)
        _check_column(config.method, job)
        _check_order(config.data.order, job)
        if config.rollout.is_served:
            check_files(list_examples(job.prompts))
        evaluated = build_evaluated(job, config.evaluation, config.pipeline)
        check_records({name: reward for name, (reward, _) in rewards.items()}, [*list_examples(job.prompts)])
        check_records(evaluated.evaluators, [*list_examples(evaluated.heldout)], label="evaluator")
        if config.prompts and not any(prompt.media for prompt in list_examples(job.prompts)):
            scorers = {**evaluated.evaluators, **{name: reward for name, (reward, _) in rewards.items()}}
            check_used([*list_examples(job.prompts, evaluated.heldout)], scorers)
        _check_watched(config, evaluated, rewards)
    group, tolerated = config.method.sampling.group, int(config.rollout.max_invalid * config.method.sampling.batch)
    runners = RewardRunners(rewards, group=group, tolerated=tolerated)
    with ExitStack() as stack:
        stack.callback(runners.close)
        with world.agreed(), wait_for(f"trying the rewards {', '.join({**rewards, **evaluated.evaluators})}"):
            _warm_up(config, job, evaluated, runners, world)
        with world.agreed(), convert_errors(UsageError, ValueError):
            conditioned = any(prompt.media for prompt in list_examples(job.prompts))
            known: Any = {"recorded": is_recorded(job.model), "any_level": knows_any_level(job.model)}
            check_model(config, job.model.prediction, **known, conditioned=conditioned)
        _check_negative_prompt(config, job, evaluated)
        job = _encode_prompts(config, job, evaluated, world)  # before the network, so that encoders have the device alone
        engine, base = _open_engine(config, job, world)
        with world.agreed():
            preferences = _open_preferences(config, job)
        networks = _open_networks(config, job, engine)
        schedules = Schedules(job.model, config.method.sampling, world.device)
        schedule, _ = schedules.of(job.shape)
        copy = _open_copy(config, job, networks, world) if config.rollout.ahead else None
        config, pairs, choices = _choose_passes(config, job, engine, schedule, resume_from)
        with world.agreed():
            # Samples of servers are compared with the engine's own network, on the main thread.
            samples_from_copy = copy is not None and not config.rollout.is_served
            source = build_source(
                config.rollout,
                config.method.sampling,
                job.model,
                copy.behaviour if copy is not None and samples_from_copy else networks.open_sampler,
                world,
                resume=config.resume or resume_from is not None,
                adapter=lambda version: networks.choose_sampler(version) or "default",
                product=config.lora.product,
                sizes=_list_pixel_sizes(config, job),
                copy=copy,
            )
            latents = any(signature_of(reward).takes("latents") for reward, _ in rewards.values())
            # Servers send the final latents only if something reads them; in process they cost nothing.
            only_steps = config.method.recorded is not None and config.method.needs.rewards != "gradients"
            sampler = RolloutSampler(
                config,
                job,
                engine,
                source,
                schedules,
                copy=copy,
                pairs=preferences,
                sends_final=latents or not (only_steps and config.rollout.is_served and config.rollout.store is None),
            )
        check_loss = with_checked_loss(config.method)
        run = Run(config, job, networks, sampler, rewards, runners, memory, pairs=pairs, stop=stop, check_loss=check_loss)
        ahead = None if copy is None else RolloutPrefetcher(run, copy)
        evaluation_schedule = move_schedule(job.model.schedule(config.evaluation_steps, evaluated.shape), world.device)
        stack.pop_all()
    return RunParts(run, ahead, evaluated, schedule, evaluation_schedule, choices, base)


@collective
def _encode_prompts(config: TrainConfig, job: Job, evaluated: Job, world: World) -> Job:
    """Encode all texts of the run if the job encodes them ahead, and return the job with the prompts that remain."""
    if job.prepare is None:
        return job
    guidance = Guidance(2.0 if config.is_guided else 1.0, config.method.sampling.guidance.negative)  # or any scale but 1
    with wait_for("encoding prompts and images"):
        prompts = job.prepare(world, list_texts(job, evaluated, guidance))
    return job if prompts is None else replace(job, prompts=prompts)


@collective
def _open_engine(config: TrainConfig, job: Job, world: World) -> tuple[Engine, str]:
    """Build the engine of the policy, and return it with the fingerprint of all weights."""
    weights = _find_sharded_weights(config, job)
    with world.agreed():
        with wait_for(f"loading the network of {config.model}"):
            module, adapter = _build_trained_network(config, job)
        share, digests = slice(world.rank, None, world.size), dict[str, str]()
        if has_values(world.device):
            tensors = sorted(module.state_dict().items())[share] if weights is None else ()
            digests = digest_tensors(tensors) if weights is None else digest_weights(weights, share=share)
    shares = world.gather_items(digests)
    base = ""
    if has_values(world.device):
        base = join_digests({name: digest for part in shares for name, digest in part.items()})
        base += "" if config.engine.base == "auto" else f" {config.engine.base}"  # other weights, after rounding
    theirs = {name for each in config.networks for name in _list_trained(config, module, each)}
    learnt = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in theirs]
    settings: Any = {"updates": config.updates, "sharding": config.engine, "weights": weights}
    engine = Engine(module, job.model.blocks(module), config.optimizer, world, **settings, parameters=learnt)
    if config.engine.compile == "reduce-overhead" and not (world.device.type == "cuda" and engine.sharded.is_whole):
        raise UsageError("engine.compile", "reduce-overhead", "True or auto", "graphs need CUDA, and whole weights per rank")
    if config.rollout.reuse == "keys" and (reason := explain_no_keys(module)) is not None:
        raise UsageError("rollout.reuse", "keys", "exact", reason)
    return engine, base + adapter


@collective
def _choose_passes(
    config: TrainConfig, job: Job, engine: Engine, schedule: Schedule, resume_from: Path | str | None
) -> tuple[TrainConfig, tuple[int, ...], dict[str, Choice]]:
    """Choose the sizes of forward passes that are auto: `engine.micro_batch` and `engine.update_micro_batch`.

    A checkpoint's sizes are reused; its pairs only if it was written on a machine like this one.

    Returns:
        The run with a number as its micro-batch; micro-batch sizes of an update in pairs, empty if the setting is a number
        or cannot be chosen; and the choices made here.
    """
    choices = dict[str, Choice]()
    if config.engine.micro_batch == "auto":
        if resume_from is not None:
            size = read_micro_batch(resume_from, engine.world)
        else:
            with wait_for("choosing engine.micro_batch by trial"):
                choices["micro_batch"] = choose_micro_batch(config, job, engine, schedule)
            size = choices["micro_batch"].micro_batch
        config = with_values(config, {"engine.micro_batch": size})
    if config.engine.update_micro_batch != "auto" or explain_fixed_pairs(config) is not None:
        return config, (), choices
    if resume_from is not None:
        known = checkpoint.read_manifest(resume_from, world=engine.world)["meta"]["runs_on"]
        pairs = known.pop("update_micro_batch", None)
        if pairs is not None and known == describe_machine(config, engine.world):
            return config, tuple(pairs), choices
    with wait_for("choosing engine.update_micro_batch by trial"):
        choices["update_micro_batch"] = choice = choose_pairs(config, job, engine, schedule)
    # Each further size of compiled blocks is one more program.
    return config, choice.sizes[:1] if engine.compiles else choice.sizes, choices


def _list_trained(config: TrainConfig, module: nn.Module, name: str) -> list[str]:
    """Return the parameters of a second trained network that is an adapter of the policy's module; else none."""
    if config.train != "lora" or not isinstance(config.networks[name], Trained):
        return []
    return [*map_adapter_names(module, name).values(), *list_head_parameters(module, name)]


@collective
def _open_networks(config: TrainConfig, job: Job, engine: Engine) -> BuiltNetworks:
    """Build the networks that the method declares."""
    frozen, trained = dict[str, ShardedModule](), dict[str, Engine]()
    for name, network in config.networks.items():
        if isinstance(network, Start | Base) and config.train == "full":
            frozen[name] = _open_frozen(config, job, engine.world)
        elif isinstance(network, Trained):
            trained[name] = _open_trained(config, job, name, network, engine)
        elif isinstance(network, Teacher) and not network.is_adapter:
            assert network.weights is not None
            frozen[name] = _open_frozen(config, job.with_weights(network.weights), engine.world)
    options: Any = {"negative": config.method.sampling.guidance.negative, "continues": config.lora.weights is not None}
    return BuiltNetworks(config.networks, engine, trained, frozen, job.model, **options)


def _open_trained(config: TrainConfig, job: Job, name: str, network: Trained, engine: Engine) -> Engine:
    """Build the engine of a second trained network: an adapter of the policy's module, or a separate module."""
    if config.train == "lora":
        return Engine(engine.sharded, config=network.optimizer, parameters=_list_trained(config, engine.module, name))
    with engine.world.agreed():
        module = _build_network(config, job)
        blocks = job.model.blocks(module)
        if network.head:
            add_head(module, blocks, name, seed=config.seed)
    weights = _find_sharded_weights(config, job)
    return Engine(module, blocks, network.optimizer, engine.world, sharding=config.engine, weights=weights)


def _open_frozen(config: TrainConfig, job: Job, world: World) -> ShardedModule:
    """Load a job's network for forward passes only."""
    weights = _find_sharded_weights(config, job)
    with world.agreed():
        for folder in {} if weights is None else [weights] if isinstance(weights, Path) else weights.values():
            if not (folder / "config.json").is_file():
                raise UsageError(f"{folder} holds no model, config.json is missing: set `teacher` to a folder of weights")
        module = _build_network(config, job).requires_grad_(False)
    return ShardedModule(module, job.model.blocks(module), world, config.engine, weights=weights)


@collective
def _open_copy(config: TrainConfig, job: Job, networks: BuiltNetworks, world: World) -> Copy:
    """Build a second network that generates rollouts while the engine's own is trained."""
    with world.agreed():
        module, _ = _build_trained_network(config, job)
    blocks, weights = job.model.blocks(module), _find_sharded_weights(config, job)
    return Copy(module, blocks, world, config.engine, weights=weights, adapter=networks.choose_sampler)


def _list_pixel_sizes(config: TrainConfig, job: Job) -> dict[tuple[int, ...], tuple[Size, int]]:
    """Return size in pixels and number of frames by the shape of a sample; empty for a model of one size."""
    if has_one_size(job.model):
        return {}
    frames, sizes = config.pipeline.frames, job.sizes or {config.pipeline.size: job.shape}
    return {tuple(shape): (size, frames) for size, shape in sizes.items()}


def _warm_up(config: TrainConfig, job: Job, evaluated: Job, runners: RewardRunners, world: World) -> None:
    """Score a blank batch with every reward and evaluator, before anything expensive."""
    count = 2 if isinstance(config.engine.micro_batch, str) else config.engine.micro_batch
    known = {id(runner.reward) for runner in runners.runners}
    others = {name: reward for name, reward in evaluated.evaluators.items() if id(reward) not in known}
    images, latents = _make_blank(config, job), torch.zeros(1, *job.shape)
    blank = Samples(images.to(world.device), job.prompts[:count], latents.to(world.device))
    warm_up(runners.runners, blank, count=count, group=config.method.sampling.group)
    warm_up_evaluators(others, blank._replace(prompts=evaluated.heldout[:count]), count=count)


def _make_blank(config: TrainConfig, job: Job) -> Tensor:
    """Return a blank image or video of the model's size; a pipeline's VAE is not loaded for it."""
    if getattr(job.model, "pipeline", None) is None:
        with torch.no_grad():
            return job.model.decode(torch.zeros(1, *job.shape))
    (height, width), frames = config.pipeline.size, config.pipeline.frames
    return torch.zeros(1, 3, *([frames] if has_frames(frames, job.shape) else []), height, width)


def _select_rewards(config: TrainConfig, job: Job, world: World) -> tuple[dict[str, tuple[Reward, float]], Job]:
    """Select the rewards of the run, and return them with their weights, and the job with its evaluators."""
    videos = has_frames(config.pipeline.frames, job.shape)
    rewards = select(job.rewards, config.rewards, videos=videos) if config.method.is_scored else {}
    of_model = with_audio({name: reward for name, (reward, _) in rewards.items()}, job.model)
    rewards = {name: (of_model[name], weight) for name, (_, weight) in rewards.items()}
    if config.method.is_scored and not rewards and config.method.needs.rewards is not None:
        raise UsageError(
            f"{config.method.method_name} learns from rewards, and this job has none: pass rewards to the job, or "
            "set `rewards`, e.g. to pickscore or module:name (fluvial rewards lists them)"
        )
    for name, (reward, _) in rewards.items():
        if (wait := getattr(reward, "waits_for_people", None)) is not None:
            _check_waits(config, name, wait, world)
    _check_floors(config, rewards)
    check_rewards(job.evaluators, label="evaluator")
    job = replace(job, evaluators=with_audio(job.evaluators, job.model))
    if not job.evaluators:  # a reward that compares samples within a group does not evaluate the policy
        independent = {name: reward for name, (reward, _) in rewards.items() if not signature_of(reward).takes("group")}
        job = replace(job, evaluators=independent)
    return rewards, job


def _check_waits(config: TrainConfig, name: str, wait: float, world: World) -> None:
    """Raise UsageError if a reward may wait longer for people, in seconds, than the run can."""
    ahead, timeout = config.rollout.ahead, config.engine.timeout
    if ahead:
        raise UsageError("rollout.ahead", ahead, "0", "a checkpoint would wait for the scores of rollouts made ahead")
    if world.size > 1 and timeout <= wait:
        hint = f"processes wait for each other's scores, and the reward {name} waits for people, {wait:g} s at most"
        raise UsageError("engine.timeout", timeout, f"more than {wait:g}", hint)


def _check_floors(config: TrainConfig, rewards: dict[str, tuple[Reward, float]]) -> None:
    """Raise UsageError unless each floor names a reward of the run without a weight, and another reward is left to learn."""
    floors = {} if config.method.advantage is None else config.method.advantage.floor_of
    for name in floors:
        if name not in rewards:
            raise UsageError(
                f"`advantage.floors` names {name!r}, expected one of the rewards of the run, {', '.join(rewards) or 'none'}"
            )
        if rewards[name][1] != 1:
            raise UsageError(
                f"`advantage.floors` names {name!r}, whose weight is its multiplier, and rewards gives it the weight "
                f"{rewards[name][1]:g}: remove the weight"
            )
    if floors and not set(rewards) - set(floors):
        raise UsageError("`advantage.floors` names every reward of the run: add a reward without a floor to `rewards`")


def _check_watched(config: TrainConfig, evaluated: Job, rewards: dict[str, tuple[Reward, float]]) -> None:
    """Raise UsageError if `stop_when_gamed` has no evaluator that training does not see."""
    if not config.evaluation.stop_when_gamed:
        return
    name = choose_watched([*evaluated.evaluators]) if evaluated.evaluators else None
    if name is None or any(evaluated.evaluators[name] is reward for reward, _ in rewards.values()):
        what = "there is no evaluator" if name is None else f"the evaluator {name!r} is a reward of the run"
        raise UsageError(
            "evaluation.stop_when_gamed",
            config.evaluation.stop_when_gamed,
            hint=f"{what}; name one that training does not see in `evaluation.rewards`",
        )


def check_model(
    config: TrainConfig,
    prediction: Prediction,
    *,
    recorded: bool = False,
    any_level: bool = False,
    conditioned: bool = False,
) -> None:
    """Raise UsageError if a run does not fit its model.

    Args:
        prediction: prediction of the model.
        recorded: whether the model is a pipeline without an adapter.
        any_level: whether that pipeline's velocity is known at levels between those of its schedule.
    """
    method, sampling, model = config.method, config.method.sampling, config.model
    sampler = sampling.sampler
    own_levels = f"{model} predicts epsilon or has no adapter, and knows only the levels of its schedule"
    on_schedule = knows_its_schedule_only(prediction, recorded=recorded and not any_level)
    if sampler.rule.prediction not in (prediction, None):
        fitting = [name for name, rule in SAMPLERS.items() if rule.prediction in (prediction, None)]
        raise UsageError("sampling.sampler", sampler.kind, " or ".join(fitting), f"{model} predicts {prediction}")
    for field, solver in (("sampling.sampler", sampler.solver), ("evaluation.solver", config.evaluation.solver)):
        if on_schedule and solver in ("sa_solver", "consistency"):
            raise UsageError(field, solver, "dpmpp_2m", own_levels)
    if method.needs.prediction not in (prediction, None):
        raise UsageError("method", method.method_name, f"one for {prediction}", f"{model} does not predict a velocity")
    if method.needs.off_schedule and on_schedule:
        raise UsageError("method", method.method_name, "one that trains on recorded steps", own_levels)
    if recorded and config.evaluation_steps != sampling.steps:
        raise UsageError("evaluation.steps", config.evaluation.steps, "that of the rollout", own_levels)
    groups = sampling.groups
    if on_schedule and isinstance(groups, ScoutedGroups) and groups.steps != sampling.steps:
        raise UsageError("sampling.groups.steps", groups.steps, f"that of the rollout, {sampling.steps}", own_levels)
    if recorded and isinstance(config.rollout.step_cache, GuidanceCache):
        raise UsageError("rollout.step_cache", "guidance", "none", f"{model} has no adapter, and its pipeline's guidance")
    if recorded and config.evaluation_guidance != sampling.guidance:
        raise UsageError("evaluation.guidance", config.evaluation.guidance, "that of the rollout", f"{model} has no adapter")
    if on_schedule and sampling.window.tail != NO_TAIL:
        raise UsageError("sampling.window.tail", sampling.window.tail.solver, "its default", own_levels)
    for name, scale in config.own_guidance.items():
        field = "ref_guidance" if hasattr(method, "ref_guidance") else "kl.guidance" if name == "ref" else "guidance"
        if recorded:
            raise UsageError(field, scale, "None", f"{model} has no adapter, and its pipeline's guidance")
        if conditioned and scale != 1 and sampling.guidance.scale == 1:
            hint = "the negative prompt gets its images only in a guided rollout: set `sampling.guidance.scale`, too"
            raise UsageError(field, scale, "None or 1", hint)
    if not isinstance(method.rows, NoisedRows):
        return
    noising = method.rows.noising.choose_levels(on_schedule=on_schedule)
    if noising != method.rows.noising:
        noising.check_steps(sampling.steps)
    if on_schedule and noising.levels.kind not in ("schedule", "stratified"):
        raise UsageError("noising.levels", noising.levels.kind, "auto, schedule or stratified", own_levels)


def _open_preferences(config: TrainConfig, job: Job) -> tuple[Preference, ...] | EncodedPreferences:
    """Open the preference dataset of the run; empty for a run that learns from other samples."""
    if isinstance(source := config.method.source, Preferences):
        # Held-out prompts of the job itself must not be in the folder; prompts split off from the folder are skipped.
        split_off = config.model not in MODELS and not config.prompts and not config.pipeline.heldout
        heldout = texts(job.heldout)
        excluded = {"skip": sorted({*heldout} - {*texts(job.prompts)})} if split_off else {"heldout": heldout}
        if job.images is not None:
            records = read_preference_records(source.folder, check=job.model.check_prompt, **excluded)
            return EncodedPreferences(records, job.images)
        return read_preferences(source.folder, encode=job.encode, shape=job.shape, check=job.model.check_prompt, **excluded)
    if (not config.makes_samples or config.method.needs.images) and job.data is None:
        raise UsageError(
            f"{config.method.method_name} learns from data, and this job has none: set `data.images` to a folder of "
            "images with captions, or pass data to the job"
        )
    return ()


def _check_negative_prompt(config: TrainConfig, job: Job, evaluated: Job) -> None:
    """Raise UsageError if a negative prompt cannot be used."""
    guidance = config.method.sampling.guidance
    prompts = [*list_examples(job.prompts, job.heldout, evaluated.heldout)]
    opposed = next((prompt for prompt in prompts if prompt.negative is not None), None)
    if opposed is not None and is_recorded(job.model):
        raise UsageError(
            f"prompt {opposed.text!r} has a negative prompt of its own, and {config.model} has no adapter, so that its "
            "guidance is fixed: leave the column negative_prompt out"
        )
    check_negatives(prompts, guided=config.is_guided, field="sampling.guidance.scale")
    if config.is_guided and guidance.negative:
        with convert_errors(UsageError, ValueError, says="sampling.guidance.negative"):
            job.model.check_prompt(guidance.negative)


def _check_sources(method: Method, job: Job) -> None:
    """Raise UsageError unless each source of prompts has a teacher, and each teacher of a source has prompts."""
    known = [*dict.fromkeys(prompt.source for prompt in list_examples(job.prompts))]
    for name, network in method.networks().items():
        taught = [*network.teachers] if isinstance(network, BySource) else known
        for source in known:
            if source not in taught:
                raise UsageError(
                    f"prompts of the source {source!r} have no {name}: add {source}=FOLDER to those of {', '.join(taught)}"
                )
        for source in taught:
            if source not in known:
                raise UsageError(f"`{name}` names the source {source!r}, expected a source of prompts: {', '.join(known)}")


def _check_column(method: Method, job: Job) -> None:
    """Raise UsageError unless each image's record has the column that the method reads, with an accepted value."""
    source = method.source
    if not isinstance(source, Images) or source.column is None:
        return
    for prompt in job.prompts:
        has = ", ".join(prompt.metadata) or "none"
        if source.column in prompt.metadata:
            if not source.values or (value := prompt.metadata[source.column]) in source.values:
                continue
            has = f"{value!r} there, expected {' or '.join(map(str, source.values))}"
        raise UsageError(
            f"{method.method_name} learns from images with a column {source.column}, and the record of "
            f"{prompt.text!r} has {has}"
        )


def _check_order(order: str, job: Job) -> None:
    """Raise UsageError if prompts have weights, which only the order epochs uses."""
    weights = list_source_weights(job.prompts, job.source_weights).values()
    uneven = len({prompt.weight for prompt in list_examples(job.prompts)}) > 1 or len({*weights}) > 1
    if order != "epochs" and uneven:
        raise UsageError(f"`data.order` is {order}, which ignores weights, and some prompts have one: use epochs")


def _build_trained_network(config: TrainConfig, job: Job) -> tuple[nn.Module, str]:
    """Build the network with its adapters, before sharding; return it with a fingerprint of the adapters that it read."""
    module = _build_network(config, job)
    folder = config.lora.weights  # adapter that the run continues from
    adapter = None if folder is None else read_adapter(folder, job, module, "lora.weights")
    listed = {name: network for name, network in config.networks.items() if isinstance(network, Teacher)}
    taught = {name: each.weights for name, each in listed.items() if each.weights is not None and each.is_adapter}
    teachers = {name: read_adapter(path, job, module, "teacher") for name, path in taught.items()}
    for path in taught.values() if config.train == "full" else ():
        raise UsageError(f"`teacher` names {path}, an adapter, and `train` is full: train lora, or merge the adapter")
    if config.train == "lora":
        learn = [name for name, network in config.networks.items() if isinstance(network, Trained)]
        adapters: tuple[str, ...] = ("default", *config.followers, *learn)
        settings, targets = config.lora, job.model.lora_targets
        if adapter is not None:
            form = settings.form if settings.form.kind == adapter.form.kind else adapter.form
            if settings.form not in (form, LowRank()):
                raise UsageError("lora.form", settings.form.kind, adapter.form.kind, f"`lora.weights` is {folder}")
            settings = replace(settings, rank=adapter.rank, alpha=adapter.alpha, form=form, weights=None)
            adapters, targets = (*adapters, START), adapter.layers
        for name, each in teachers.items():
            if each.form.kind != settings.form.kind and "lokr" in (each.form.kind, settings.form.kind):
                problem = f"an adapter of the form {each.form.kind} beside {settings.form.kind}: set lora.form"
                raise UsageError(f"`teacher` names {taught[name]}, {problem}")
        further = {name: LoraConfig(each.rank, each.alpha, form=each.form) for name, each in teachers.items()}
        with convert_errors(UsageError, ValueError):
            add_lora(module, settings, targets, adapters=adapters, trained=learn, further=further, seed=config.seed)
        layers = {*find_lora_layers(module)}
        for name, each in teachers.items():
            if differing := layers ^ {*each.layers}:
                whose = "it" if min(differing) in each.layers else "the policy"
                problem = f"{whose} alone adapts {min(differing)}: set lora.targets to the layers of the teacher"
                raise UsageError(f"`teacher` names {taught[name]}, and {problem}")
        behind = {name for name, follower in config.followers.items() if follower.network in learn}
        start = (
            {} if adapter is None else dict.fromkeys([name for name in adapters if name not in {*learn, *behind}], adapter)
        )
        for name, each in {**start, **teachers}.items():
            with convert_errors(UsageError, ValueError, says=f"`{'teacher' if name in teachers else 'lora.weights'}`"):
                load_lora(module, each.tensors, name)
        for name in sorted(find_heads(config.networks)):
            add_head(module, job.model.blocks(module), name, seed=config.seed)
    return module, "".join(
        f" {digest_adapter(each)}" for each in (*([] if adapter is None else [adapter]), *teachers.values())
    )


def _build_network(config: TrainConfig, job: Job) -> nn.Module:
    """Build a job's network with its base weights; with parameters on the meta device if each rank reads its own shards."""
    return jobs.build(job, empty=_find_sharded_weights(config, job) is not None)


def _find_sharded_weights(config: TrainConfig, job: Job) -> Weights | None:
    """Return the folder from which each rank reads its own shards; None if the network is loaded as a whole."""
    return job.model.weights if config.engine.init == "sharded" else None
