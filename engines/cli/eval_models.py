"""What `fluvial eval` evaluates: a model, the export of a run or a checkpoint; and the base that it is compared with."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.checkpoint.storage import MANIFEST
from fluvial.engines.cli.parse import one_size
from fluvial.engines.errors import UsageError
from fluvial.engines.evaluation.config import EvaluationConfig
from fluvial.engines.export.run import policy_of
from fluvial.engines.fsdp.config import EngineConfig
from fluvial.engines.fsdp.determinism import deterministic
from fluvial.engines.fsdp.module import ShardedModule
from fluvial.engines.fsdp.world import World
from fluvial.engines.rewards.registry import without_weight
from fluvial.engines.rollout.generate import Guidance
from fluvial.engines.train import job as jobs
from fluvial.engines.train.config import BUILT_IN, TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.jobs.evaluated import check_negatives, evaluated
from fluvial.engines.train.jobs.pipeline import is_adapter, read_prompts_of
from fluvial.engines.train.jobs.weights import RECORD, WEIGHTS, add_adapter, is_run, with_base
from fluvial.engines.train.record import recorded

if TYPE_CHECKING:
    from fluvial.engines.cli.eval import EvalConfig

START = "start"
HELDOUT = "held-out prompts"


class Subject(NamedTuple):
    """A network to evaluate."""

    title: str
    job: Job  # with the prompts, evaluators and size of the evaluation
    network: Callable[[], AbstractContextManager[nn.Module]]  # opens it for forward passes


class Subjects(NamedTuple):
    """What is evaluated, and what it is compared with, which is sampled first."""

    ours: Subject
    base: Subject | None
    guidance: Guidance
    prompts: str  # which prompts those are, for the table's title


@dataclass(frozen=True)
class Source:
    """A run as its record tells it.

    Args:
        config: settings of the run.
        folder: folder of the run.
        checkpoint: checkpoint to evaluate; None is the export.
    """

    config: TrainConfig
    folder: Path
    checkpoint: str | None


def source_of(name: str) -> Source | None:
    """Return the run that a name stands for: its folder, or one of its checkpoints. None for a model.

    Raises:
        UsageError: the record cannot be read, or there is neither an export nor a checkpoint.
    """
    path = Path(name)
    if is_run(name):
        config = _record(path)
        if (path / WEIGHTS).is_dir():
            return Source(config, path, None)
        saved = checkpoint.listed(config.checkpoint_folder)
        if not saved:
            raise UsageError(f"{name} is a run that has neither exported weights nor a checkpoint: let it go on (--resume)")
        return Source(config, path, str(saved[-1]))
    if not (path / MANIFEST).is_file():
        return None
    run = path.absolute().parent.parent
    if not (run / RECORD).is_file():
        raise UsageError(f"{name} is a checkpoint, and {run} holds no run: evaluate it where its run is")
    return Source(_record(run), run, name)


def settings_of_run(name: str, config: "EvalConfig") -> "EvalConfig | None":
    """Return the settings of a run's own evaluations; None if the name is not that of a run or checkpoint."""
    source = source_of(name)
    if source is None:
        return None
    of, own = source.config, source.config.evaluation
    chosen = of.micro_batch if isinstance(of.micro_batch, int) else config.micro_batch
    return replace(
        config, seeds=own.seeds, samples=None if own.seeds else of.final_samples, steps=of.evaluation_steps,
        guidance=of.evaluation_guidance.scale, negative=of.evaluation_guidance.negative, solver=own.solver,
        average=own.average, micro_batch=chosen, compute=of.engine.compute,
        pipeline=replace(
            of.pipeline, sizes=(), height=own.height or of.pipeline.size.height, width=own.width or of.pipeline.size.width
        ),
    )  # fmt: skip


def opened(name: str, config: "EvalConfig", world: World, stack: ExitStack) -> Subjects:
    """Return the networks of an evaluation.

    Args:
        name: model, run or checkpoint.
        config: what was asked for.
        world: process group.
        stack: what is to be closed after the evaluation.

    Raises:
        UsageError: something that was asked for does not exist, or does not fit.
    """
    with world.agreed():
        one_size(config.pipeline)
        source = source_of(name) if name not in BUILT_IN else None
        model = name if source is None else source.config.model
        guidance = Guidance(config.guidance, config.negative)
        if source is not None:
            given = source.config.rollout.guidance
            guidance = replace(given, scale=config.guidance, negative=config.negative, update="guided")
        asked = _asked(model, config, source)
        if source is not None and (config.weights is not None or config.lora is not None):
            raise UsageError(f"weights or lora is set, and {name} has its own: leave them out, or name the model {model}")
        if config.base == START and source is None and config.weights is None and config.lora is None:
            raise UsageError(
                "base is start, and there is nothing to compare with it: weights is None and lora is None, expected one of "
                "them, or the name of a run or a checkpoint"
            )
    known = bool(config.prompts or asked.prompts)
    if source is not None and source.checkpoint is not None:
        ours, start = _of_checkpoint(name, source, config, asked, world, stack)
    else:
        with world.agreed():
            ours, start = _of_weights(name, source, config, asked, world)
    base = None
    if config.base == START:
        base = start
    elif config.base is not None:
        with world.agreed():
            base = _of_base(config.base, model, ours.job, config, world)
    with world.agreed():
        check_negatives(ours.job.heldout, guided=config.guidance != 1, field="guidance")
        _check_rewards(ours.job)
    return Subjects(ours, base, guidance, "prompts" if known else HELDOUT)


def _asked(model: str, config: "EvalConfig", source: Source | None) -> EvaluationConfig:
    """Return what is evaluated as a run's settings have it: what was typed, else what the run's record says."""
    own = EvaluationConfig() if source is None else source.config.evaluation
    rewards = config.rewards or own.rewards
    if not rewards and source is not None and model not in BUILT_IN and source.config.scores_samples:
        rewards = tuple(map(without_weight, source.config.rewards)) or ("jpeg",)
    return EvaluationConfig(
        prompts=config.prompts or own.prompts, rewards=rewards, seeds=config.seeds, steps=config.steps,
        guidance=config.guidance, solver=config.solver, average=config.average,
    )  # fmt: skip


def _of_weights(
    name: str, source: Source | None, config: "EvalConfig", asked: EvaluationConfig, world: World
) -> tuple[Subject, Subject]:
    """Return a model with the weights that were typed or that a run has exported, and what it started from."""
    engine = EngineConfig(compute=config.compute, compile=False)  # an evaluation is short
    if source is None:
        model, weights, first, lora, first_lora = name, config.weights, None, config.lora, None
        title = str(config.lora or config.weights or ("the shipped base" if name in BUILT_IN else name))
    else:
        run = source.config
        model, weights, first, lora, first_lora = run.model, source.folder / WEIGHTS, run.weights, None, run.lora.weights
        title, engine = name, replace(_uncompiled(run, config), replicas="auto", context_parallel=1)
    start = _job(model, first, config)
    start = replace(start, heldout=_heldout(start, model, source, asked))
    start = evaluated(start, asked, config.pipeline)
    ours = start if weights is None else _with_weights(start, model, weights)
    return (
        Subject(title, ours, _network(ours, lora, engine, world)),
        Subject(START, start, _network(start, first_lora, engine, world)),
    )


def _of_checkpoint(
    name: str, source: Source, config: "EvalConfig", asked: EvaluationConfig, world: World, stack: ExitStack
) -> tuple[Subject, Subject]:
    """Return the policy of a checkpoint, and that which its run started from; the base is to be opened first."""
    from fluvial.engines.train.trainer import Trainer

    run, size = source.config, config.pipeline.size
    own = run.rollout.guidance.negative
    if size != run.pipeline.size:
        asked = replace(asked, height=size.height, width=size.width)
    with world.agreed():
        if config.negative != own:
            raise UsageError(f"negative is {config.negative!r}, and the run of {name} has {own!r}: leave it as it is")
        run = replace(
            run, evaluation=asked, engine=replace(_uncompiled(run, config), replicas="auto", context_parallel=1),
            pipeline=replace(
                config.pipeline, sizes=run.pipeline.sizes, height=run.pipeline.height, width=run.pipeline.width
            ),
        )  # fmt: skip
    stack.enter_context(deterministic(run.engine.deterministic))
    trainer = stack.enter_context(Trainer(run, None, world))

    @contextmanager
    def network() -> Iterator[nn.Module]:
        trainer.resume(str(source.checkpoint))
        with trainer.engine.inference(average=config.average) as module:
            yield module

    return (
        Subject(name, trainer.evaluated, network),
        Subject(START, trainer.evaluated, lambda: trainer.engine.inference()),
    )


def _of_base(base: str, model: str, job: Job, config: "EvalConfig", world: World) -> Subject:
    """Return the base of a run, of one of its checkpoints, or of a folder of weights.

    Raises:
        UsageError: there is no such folder, or it is of another model.
    """
    source, folder = source_of(base), Path(base)
    engine = EngineConfig(compute=config.compute, compile=False)
    if source is not None:
        other, folder = source.config.model, source.folder / WEIGHTS
        if not _is_same(other, model):
            raise UsageError(f"base is {base}, a run of {other}, and {model} is evaluated: expected a run of the same model")
    elif not folder.is_dir():
        raise UsageError(f"base is {base}, expected start, the folder of a run, a checkpoint or a folder of weights")
    if source is not None and source.checkpoint is not None:
        return Subject(base, job, _saved(source.checkpoint, job, config, engine, world))
    with_these = _with_weights(job, model, folder)
    return Subject(base, with_these, _network(with_these, None, engine, world))


def _is_same(model: str, other: str) -> bool:
    """Return whether two names are of one model; a folder has several."""
    folders = Path(model), Path(other)
    return model == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


def _saved(
    place: str, job: Job, config: "EvalConfig", engine: EngineConfig, world: World
) -> Callable[[], AbstractContextManager[nn.Module]]:
    """Return the function that opens the policy of a checkpoint, sharded over the ranks."""

    @contextmanager
    def network() -> Iterator[nn.Module]:
        module, weights = policy_of(place, average=config.average, world=world)
        with ShardedModule(module, job.model.blocks(module), world, engine, weights=weights).inference() as found:
            yield found

    return network


def _job(model: str, weights: Path | None, config: "EvalConfig") -> Job:
    """Return the job of a model without prompts of its own, with other weights if a folder is given."""
    if model in BUILT_IN:
        return jobs.named(model, weights=weights)
    from fluvial.models.rewards.jpeg import jpeg_compressibility

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    guidance = Guidance(config.guidance, config.negative)
    compute = EngineConfig(compute=config.compute).compute_dtype(device)
    job = jobs.opened(model, config.pipeline, steps=config.steps, guidance=guidance, compute=compute)
    own: Any = job.model
    job = replace(job, rewards={"jpeg": jpeg_compressibility}, load=None if is_adapter(model) else own.with_weights)
    return with_base(job, weights)


def _with_weights(job: Job, model: str, weights: Path) -> Job:
    """Return a job with other weights; those of a pipeline are checked to be of its network first."""
    return job.with_weights(weights) if model in BUILT_IN else with_base(job, weights)


def _heldout(job: Job, model: str, source: Source | None, asked: EvaluationConfig) -> tuple[str, ...]:
    """Return the held-out prompts of a run or of a built-in model; none where prompts are asked for.

    Raises:
        UsageError: there are none.
    """
    if asked.prompts or model in BUILT_IN:
        return job.heldout
    if source is None:
        raise UsageError(f"{model} needs prompts to evaluate on: set prompts to a file, as for training")
    of = source.config
    return read_prompts_of(
        of.pipeline, prompts=of.prompts, preferences=of.objective.traits.preferences, data=of.data,
        check=job.model.check_prompt,
    ).heldout  # fmt: skip


def _uncompiled(run: TrainConfig, config: "EvalConfig") -> EngineConfig:
    """Return the engine of a run, without the compilation that a run chooses by itself and warms up for."""
    return replace(run.engine, compute=config.compute, compile=run.engine.compile is True)


def _check_rewards(job: Job) -> None:
    """Raise UsageError if there is no evaluator."""
    if not job.evaluators:
        raise UsageError("rewards is empty, expected at least one evaluator, such as jpeg or mymodule:score")


def _network(
    job: Job, lora: Path | None, engine: EngineConfig, world: World
) -> Callable[[], AbstractContextManager[nn.Module]]:
    """Return the function that opens a job's network, sharded over the ranks, with an adapter if one is given."""

    @contextmanager
    def network() -> Iterator[nn.Module]:
        with world.agreed():
            weights = job.model.weights
            module = jobs.build(job, empty=weights is not None)
            if lora is not None:
                add_adapter(module, job, lora, field="--lora")
            module.requires_grad_(False)
        sharded = ShardedModule(module, job.model.blocks(module), world, engine, weights=weights)
        with sharded.inference() as found:
            yield found

    return network


def _record(folder: Path) -> TrainConfig:
    """Return the settings of the run in a folder.

    Raises:
        UsageError: its record is of another version, or damaged.
    """
    try:
        return replace(recorded(json.loads((folder / RECORD).read_text())), out=folder, resume=False, resume_from=None)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{folder / RECORD} is not the record of a run of this version: {error}") from error
