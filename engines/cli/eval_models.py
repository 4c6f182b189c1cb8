"""Settings and subjects of `fluvial eval`: a model, the export of a run or a checkpoint; and the base to compare with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from torch import nn

from fluvial.core.checks import BATCH, SCALE, STEPS, check_fields
from fluvial.engines.cli.parse import check_pipeline
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.extensions.published.runs import load_published
from fluvial.engines.run import job as jobs
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.checkpoint.storage import MANIFEST
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.evaluation.config import EvaluationConfig, SuiteConfig
from fluvial.engines.run.exports import build_policy, export_run
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.evaluated import build_evaluated, check_negatives
from fluvial.engines.run.jobs.media import list_media_columns
from fluvial.engines.run.jobs.pipeline import check_second_scale, read_run_prompts
from fluvial.engines.run.jobs.settings import MachineConfig, PipelineConfig
from fluvial.engines.run.jobs.weights import RECORD, WEIGHTS, add_adapter, is_run, read_configuration, with_base
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.solvers import SolverChoice
from fluvial.engines.scoring.registry import strip_weight
from fluvial.models import is_recorded
from fluvial.models.device import default_device, deterministic

START = "start"
HELDOUT = "held-out prompts"
Network = Callable[[], AbstractContextManager[nn.Module]]  # opens a network for forward passes


@dataclass(frozen=True)
class EvalConfig:
    """Score samples of prompts, drawn without noise on the way, and compare them with those of a base model.

    MODEL is a built-in model, a pipeline of diffusers (folder or id), the folder of a run, whose exported weights are
    evaluated, or one of a run's checkpoints. A run and a checkpoint bring their prompts, evaluators and settings.

    Args:
        suite: Prompts, evaluators and settings by name, compared with what a run started from: geneval, ocr, compression,
            preference, a .toml file, or module:name. What is typed beside it replaces its own.
        prompts: Files of prompts, as for training, or the held-out parts of prompt sets (@ocr). By default those that the
            run or the built-in model holds out.
        rewards: Evaluators: names such as jpeg, or functions (images, prompts) -> [B] as module:name. By default those of
            the run or of the built-in model.
        base: Base model that is sampled from the same noise: start (what the weights, the adapter or the run started from),
            the folder of a run, one of its checkpoints, or a folder of weights. None compares with nothing.
        weights: Folder of weights in place of the model's own, such as the `weights` of a run folder.
        lora: File or folder of an adapter, such as the `lora` of a run folder.
        out: Folder for images, scores.csv, table.csv, table.json and sheet.png. None prints the table and writes nothing.
        seeds: Number of samples per prompt. None draws prompts at random.
        samples: Number of samples; with seeds the largest number, for which evenly spaced prompts are left out. None takes
            every prompt.
        steps: Number of steps of the sampling schedule.
        guidance: Scale of classifier-free guidance; 1 is no guidance.
        negative: Negative prompt, which guided samples are guided away from.
        solver: Solver: euler, dpmpp_2m, unipc, sa_solver, consistency (with new noise at each step, as few-step students of
            DMD2 are sampled) or auto (that the model is served with).
        average: Take the moving average of a checkpoint's weights, if it has one.
        micro_batch: Number of samples per forward pass.
        compute: Dtype of the network's computation: float32, bfloat16, float16, or auto (bfloat16 on CUDA).
        pipeline: Size of the images, and how a pipeline is opened.
    """

    suite: str | None = None
    prompts: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    base: str | None = None
    weights: Path | None = None
    lora: Path | None = None
    out: Path | None = None
    seeds: int | None = None
    samples: int | None = 400
    steps: int = 10
    guidance: float = 1.0
    negative: str = ""
    solver: SolverChoice = "auto"
    average: bool = True
    micro_batch: int = 64
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        check_fields(self, "", steps=STEPS, micro_batch=BATCH, seeds=BATCH, samples=BATCH, guidance=SCALE)
        if self.seeds is None and self.samples is None:
            raise UsageError("`samples` is None, and `seeds` is None: set one of them to a number")


class Subject(NamedTuple):
    """A network to evaluate."""

    title: str
    job: Job  # with the prompts, evaluators and size of the evaluation
    network: Network


class Subjects(NamedTuple):
    """The model that is evaluated, and the one it is compared with, which is sampled first."""

    ours: Subject
    base: Subject | None
    guidance: Guidance
    prompts: str  # which prompts those are, for the table's title


class RecordedRun(NamedTuple):
    """A run as its record tells it."""

    config: TrainConfig
    folder: Path
    checkpoint: str | None  # the one to evaluate; None is the export


def source_of(name: str) -> RecordedRun | None:
    """Return the run that a name stands for: its folder, or one of its checkpoints. None for a model.

    Raises:
        UsageError: the record cannot be read, or there is neither an export nor a checkpoint.
    """
    path = Path(name)
    if is_run(name):
        config = read_configuration(path)
        if (path / WEIGHTS).is_dir():
            return RecordedRun(config, path, None)
        saved = checkpoint.list_newest_first(config.checkpoint_folders)
        if not saved:
            raise UsageError(f"{name} is a run that has neither exported weights nor a checkpoint: let it go on (--resume)")
        return RecordedRun(config, path, str(saved[0]))
    if not (path / MANIFEST).is_file():
        return None
    run = path.absolute().parent.parent
    if not (run / RECORD).is_file():
        raise UsageError(f"{name} is a checkpoint, and {run} holds no run: evaluate it where its run is")
    return RecordedRun(read_configuration(run), run, name)


@contextmanager
def open_model(name: str, *, weights: Path | None, lora: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Yield a model and the folder of its weights, None for its own: those exported of a run, or those of a checkpoint.

    A checkpoint, and the newest one of a run that has exported nothing, is exported to a temporary folder.

    Raises:
        UsageError: the run has neither, or `weights` or `lora` are given beside it.
    """
    source = source_of(name)
    if source is None:
        yield name, weights
        return
    for flag, value in (("weights", weights), ("lora", lora)):
        if value is not None:
            raise no_effect(flag, f"with {name}, a run with its own")
    if source.checkpoint is None:
        yield source.config.model, source.folder / WEIGHTS
        return
    average = source.config.evaluation.average and source.config.optimizer.ema_decay > 0
    with TemporaryDirectory() as folder:
        out = Path(folder) / WEIGHTS
        with init_world() as world:
            export_run(source.checkpoint, "merged", out=out, average=average, dtype="float32", world=world)
        yield source.config.model, out


def drawing_settings(run: TrainConfig) -> dict[str, Any]:
    """Return the settings with which a run evaluates, for drawing samples with its weights."""
    size = run.pipeline.size
    return {
        "steps": run.evaluation_steps,
        "guidance": replace(run.evaluation_guidance, update="guided"),
        "pipeline": replace(run.pipeline, sizes=(), height=size.height, width=size.width, weights=None),
    }


def settings_of_run(name: str, config: EvalConfig) -> EvalConfig:
    """Return the settings of a run's own evaluations; those given if the name is not that of a run or checkpoint."""
    source = source_of(name)
    if source is None:
        return config
    run, recorded = source.config, source.config.evaluation
    guidance, pipeline = run.evaluation_guidance, replace(run.pipeline, weights=None)
    if recorded.height or recorded.width or pipeline.sizes:
        size = pipeline.size
        pipeline = replace(pipeline, sizes=(), height=recorded.height or size.height, width=recorded.width or size.width)
    return replace(
        config,
        seeds=recorded.seeds,
        samples=None if recorded.seeds else run.evaluation.final_samples,
        steps=run.evaluation_steps,
        guidance=guidance.scale,
        negative=guidance.negative,
        solver=(run.method.serving_solver or "auto") if recorded.solver == "auto" else recorded.solver,
        average=recorded.average,
        micro_batch=recorded.micro_batch
        or (each if isinstance(each := run.engine.micro_batch, int) else config.micro_batch),
        compute=run.engine.compute,
        pipeline=pipeline,
    )


def settings_of_suite(name: str, suite: SuiteConfig, config: EvalConfig, *, compared: bool) -> EvalConfig:
    """Return the settings of a suite, and those given where it has none.

    Args:
        name: model, run or checkpoint. A model on the Hub has the guidance with which its published runs are evaluated.
        suite: suite.
        config: settings of the run, or of the kind of model.
        compared: whether there is something to compare with: what a run, weights or an adapter started from.
    """
    scale = config.guidance
    if source_of(name) is None:
        stated = [run.settings for run in load_published().values() if "evaluation.guidance" in run.settings]
        scales = [each["evaluation.guidance"].value for each in stated if each["model"].value == name]
        scale = max(scales, key=scales.count, default=scale)
    size = config.pipeline.size
    pipeline = replace(config.pipeline, height=suite.height or size.height, width=suite.width or size.width)
    return replace(
        config,
        prompts=suite.prompts,
        rewards=suite.rewards,
        base=START if compared else config.base,
        seeds=suite.seeds or 1,
        samples=None,
        steps=suite.steps or config.steps,
        guidance=scale if suite.guidance is None else suite.guidance,
        solver=config.solver if suite.solver == "auto" else suite.solver,
        average=suite.average and config.average,
        pipeline=pipeline if suite.height or suite.width else config.pipeline,
    )


def open_networks(name: str, config: EvalConfig, world: World, stack: ExitStack) -> Subjects:
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
        check_pipeline(config.pipeline)
        source = source_of(name)
        model = name if source is None else source.config.model
        guidance = Guidance(config.guidance, config.negative)
        if source is not None:
            guidance_of_run = source.config.method.sampling.guidance
            guidance = replace(guidance_of_run, scale=config.guidance, negative=config.negative, update="guided")
        # What was typed, else what the run's record says.
        recorded = EvaluationConfig() if source is None else source.config.evaluation
        asked = EvaluationConfig(
            prompts=config.prompts or recorded.prompts,
            rewards=config.rewards or recorded.rewards,
            seeds=config.seeds,
            steps=config.steps,
            guidance=config.guidance,
            solver=config.solver,
            average=config.average,
        )
        if source is not None and (config.weights is not None or config.lora is not None):
            raise UsageError(f"`weights` and `lora` have no effect with {name}, a run with its own; remove them")
        if config.base == START and source is None and config.weights is None and config.lora is None:
            raise UsageError(
                "`base` is start, and there is nothing to compare with it: `weights` is None and `lora` is None, "
                "expected one of them, or the name of a run or a checkpoint"
            )
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
        if not ours.job.evaluators:
            raise UsageError("`rewards` is empty, expected at least one evaluator, such as jpeg or mymodule:score")
    return Subjects(ours, base, guidance, "prompts" if asked.prompts else HELDOUT)


def _of_weights(
    name: str, source: RecordedRun | None, config: EvalConfig, asked: EvaluationConfig, world: World
) -> tuple[Subject, Subject]:
    """Return a model with the weights that were typed or that a run has exported, and what it started from."""
    if source is None:
        start = _job(name, None, config)
        check_second_scale(start.model, guided=config.guidance != 1)
        weights, lora, first_lora = config.weights, config.lora, None
        title, engine = str(lora or weights or name), _engine(config)
    else:
        run = source.config
        start = _job(run.model, run.pipeline.weights, config)
        weights, lora, first_lora = source.folder / WEIGHTS, None, run.lora.weights
        title, engine = name, _engine_of_run(run, config)
        if not asked.rewards and not start.evaluators and run.method.is_scored:
            asked = replace(asked, rewards=tuple(map(strip_weight, run.rewards)))
    start = replace(start, heldout=_heldout(start, name, source, asked))
    if is_recorded(start.model) and any(prompt.media for prompt in start.heldout):
        model: Any = start.model
        model = model.adapt_to(model_inputs(start.heldout))
        start = replace(start, model=model, load=model.with_weights)
    start = build_evaluated(start, asked, config.pipeline)
    ours = with_base(start, weights)
    exported = engine if source is None else replace(engine, base="auto")  # whose weights are dequantised, and stay so
    return (
        Subject(title, ours, _network(ours, lora, exported, world)),
        Subject(START, start, _network(start, first_lora, engine, world)),
    )


def _of_checkpoint(
    name: str, source: RecordedRun, config: EvalConfig, asked: EvaluationConfig, world: World, stack: ExitStack
) -> tuple[Subject, Subject]:
    """Return the policy of a checkpoint, and that which its run started from; the base is to be opened first."""
    from fluvial.engines.run.trainer import Trainer

    run, size = source.config, config.pipeline.size
    recorded = run.method.sampling.guidance.negative
    if size != run.pipeline.size:
        asked = replace(asked, height=size.height, width=size.width)
    with world.agreed():
        if config.negative != recorded:
            raise UsageError(
                "negative", config.negative, repr(recorded), f"that is the negative prompt of the run of {name}"
            )
        kept = {field: getattr(run.pipeline, field) for field in ("sizes", "height", "width", "weights")}
        pipeline = replace(config.pipeline, **kept)
        run = replace(run, evaluation=asked, engine=_engine_of_run(run, config), pipeline=pipeline)
    stack.enter_context(deterministic(run.engine.deterministic))
    trainer = stack.enter_context(Trainer(run, None, world))

    @contextmanager
    def network() -> Iterator[nn.Module]:
        trainer.resume(str(source.checkpoint))
        with trainer.engine.inference(average=config.average) as module:
            yield module

    return (Subject(name, trainer.evaluated, network), Subject(START, trainer.evaluated, lambda: trainer.engine.inference()))


def _of_base(base: str, model: str, job: Job, config: EvalConfig, world: World) -> Subject:
    """Return the base of a run, of one of its checkpoints, or of a folder of weights."""
    source, folder = source_of(base), Path(base)
    engine = _engine(config)
    if source is not None:
        other, folder = source.config.model, source.folder / WEIGHTS
        folders = Path(other), Path(model)  # a folder has several names
        if other != model and not (all(map(Path.is_dir, folders)) and folders[0].samefile(folders[1])):
            raise UsageError(
                f"`base` is {base}, a run of {other}, and {model} is evaluated: expected a run of the same model"
            )
    elif not folder.is_dir():
        raise UsageError("base", base, "start, the folder of a run, a checkpoint or a folder of weights")
    if source is not None and source.checkpoint is not None:
        load = partial(build_policy, source.checkpoint, average=config.average, world=world)
        return Subject(base, job, partial(_open, job, engine, world, load))
    with_these = with_base(job, folder)
    return Subject(base, with_these, _network(with_these, None, engine, world))


def _job(model: str, weights: Path | None, config: EvalConfig) -> Job:
    """Return the job of a model, with other weights if a folder is given."""
    guidance = Guidance(config.guidance, config.negative)
    compute = _engine(config).compute_dtype(default_device())
    return jobs.open_to_sample(
        model, config.pipeline, steps=config.steps, guidance=guidance, weights=weights, compute=compute
    )


def _heldout(job: Job, name: str, source: RecordedRun | None, asked: EvaluationConfig) -> Sequence[Prompt]:
    """Return the held-out prompts of the model or of a run; those of the job where prompts are asked for."""
    if asked.prompts or job.heldout:
        return job.heldout
    if source is None:
        raise UsageError(f"{name} needs prompts to evaluate on: set `prompts` to a file, as for training")
    run = source.config
    return read_run_prompts(
        run.pipeline,
        prompts=run.prompts,
        preferences=None if (data_of_run := run.method.source) is None else getattr(data_of_run, "folder", None),
        data=run.data.images,
        check=job.model.check_prompt,
        media={} if run.data.images else list_media_columns(job.model, run.pipeline.media),
    ).heldout


def _engine(config: EvalConfig) -> EngineConfig:
    """Return the engine of a short evaluation."""
    return EngineConfig(compute=config.compute, compile=False)


def _engine_of_run(run: TrainConfig, config: EvalConfig) -> MachineConfig:
    """Return the engine of a run, without the compilation that a run chooses by itself and warms up for."""
    uncompiled = run.engine.compile is True
    return replace(run.engine, compute=config.compute, compile=uncompiled, replicas="auto", context_parallel=1)


def _network(job: Job, lora: Path | None, engine: EngineConfig, world: World) -> Network:
    """Return the function that opens a job's network, sharded over the ranks, with an adapter if one is given."""

    def build() -> tuple[nn.Module, Any]:
        with world.agreed():
            weights = job.model.weights
            module = jobs.build(job, empty=weights is not None)
            if lora is not None:
                add_adapter(module, job, lora, field="lora")
            return module.requires_grad_(False), weights

    return partial(_open, job, engine, world, build)


@contextmanager
def _open(job: Job, engine: EngineConfig, world: World, build: Callable[[], tuple[nn.Module, Any]]) -> Iterator[nn.Module]:
    """Open the network and weights of `build`, sharded over the ranks."""
    module, weights = build()
    with ShardedModule(module, job.model.blocks(module), world, engine, weights=weights).inference() as opened:
        yield opened
