"""`fluvial eval MODEL`: sample prompts with a model, a run or a checkpoint, and score the samples with evaluators."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import at_least_one, console, flags_in_errors, named, parsed, typed
from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.rollout.solvers import SolverChoice, serving_solver
from fluvial.engines.train.config import PipelineConfig


@dataclass(frozen=True)
class EvalConfig:
    """Score samples of prompts, drawn without noise on the way, and compare them with those of a base model.

    MODEL is a built-in model, a pipeline of diffusers (folder or id), the folder of a run, whose exported weights are
    evaluated, or one of a run's checkpoints. A run and a checkpoint bring their prompts, evaluators and settings.

    Args:
        prompts: Files of prompts, as for training. By default those that the run or the built-in model holds out.
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
        guidance: Scale of classifier-free guidance; 1 is none.
        negative: Negative prompt, which guided samples are guided away from.
        solver: Solver of the ODE: euler, dpmpp_2m, unipc, sa_solver or auto (that the model is served with).
        average: Take the moving average of a checkpoint's weights, if it has one.
        micro_batch: Number of samples per forward pass.
        compute: Dtype of the network's computation: float32, bfloat16, or auto (bfloat16 on CUDA).
        pipeline: Size of the images, and how a pipeline is opened.
    """

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
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, micro_batch=self.micro_batch)
        at_least_one(**{name: value for name in ("seeds", "samples") if (value := getattr(self, name)) is not None})
        if not 0 <= self.guidance < 1e6:
            raise UsageError(f"guidance is {self.guidance}, expected a number in [0, 1e6]")
        if self.seeds is None and self.samples is None:
            raise UsageError("samples is None, and seeds is None: set one of them to a number")


def run(args: list[str]) -> None:
    """Print what each evaluator finds, and write the folder if one is asked for.

    Raises:
        UsageError: the arguments are wrong.
    """
    name = named("eval", args, tuple(BUILT_IN), "a model, or a folder of a pipeline, run or checkpoint", fits=_may_be_model)
    config = parsed(EvalConfig, lambda: defaults(name, args[1:]), f"fluvial eval {name}", args[1:], about=EvalConfig.__doc__)
    with flags_in_errors(config), _fields_of_eval():
        score(name, config)


def defaults(name: str, args: list[str]) -> EvalConfig:
    """Return the settings of an evaluation where nothing is typed: those of the run, or of the kind of model.

    Raises:
        UsageError: the record of the run cannot be read.
    """
    from fluvial.engines.cli.eval_models import settings_of_run

    config = EvalConfig()
    if name not in BUILT_IN:
        config = settings_of_run(name, config) or replace(config, seeds=1, samples=None, steps=20, micro_batch=4)
    # Prompts of a file, and several samples per prompt, are wanted each and not drawn.
    if typed(args, "--prompts") or typed(args, "--seeds"):
        config = replace(config, seeds=config.seeds or 1, samples=None)
    return config


def score(name: str, config: EvalConfig) -> None:
    """Sample, score, print the table, and write the folder."""
    from contextlib import ExitStack

    from fluvial.engines.cli.eval_models import opened
    from fluvial.engines.evaluation.evaluate import evaluate
    from fluvial.engines.evaluation.folder import BASE, IMAGES, EvaluationFolder
    from fluvial.engines.evaluation.table import printed, rows
    from fluvial.engines.fsdp.world import init_world
    from fluvial.engines.rollout.generate import on_device
    from fluvial.engines.run.run_folder import finite

    with init_world() as world, ExitStack() as stack:
        subjects = opened(name, config, world, stack)
        folder = None if config.out is None else EvaluationFolder(config.out, world)
        found = {}
        for kind, subject in ((BASE, subjects.base), (IMAGES, subjects.ours)):
            if subject is None:
                continue
            with subject.network() as module:
                found[kind] = evaluate(
                    subject.job, module, samples=config.samples, seeds=config.seeds, micro_batch=config.micro_batch,
                    schedule=on_device(subject.job.model.schedule(config.steps, subject.job.shape), world.device),
                    world=world, guidance=subjects.guidance, solver=serving_solver(config.solver, subject.job.model),
                    keep=None if folder is None else folder.keep(kind),
                )  # fmt: skip
        ours, base = found[IMAGES], found.get(BASE)
        table = rows(ours.scores, None if base is None else base.scores)
        title = subjects.ours.title
        if folder is not None:
            settings = finite(_as_text(asdict(config)))
            folder.finish(table, ours, base, title=title, settings=settings)
        if world.is_main:
            versus = "" if subjects.base is None else f", base {subjects.base.title}"
            for sheet in printed(f"{subjects.prompts}, {ours.samples} samples of {title}{versus}", table):
                console().print(sheet, highlight=False)
            if config.out is not None:
                console().print(f"images, scores and table: {config.out}", highlight=False, soft_wrap=True)


def _may_be_model(name: str) -> bool:
    """Return whether a name may be that of a pipeline, of a run or checkpoint, or is a person's own module:name."""
    return "/" in name or ":" in name or Path(name).is_dir()


@contextlib.contextmanager
def _fields_of_eval() -> Iterator[None]:
    """Name the fields of a run's evaluation as those of this command, e.g. `prompts` for `evaluation.prompts`."""
    try:
        yield
    except FluvialError as error:
        text = str(error)
        for name in ("prompts", "rewards", "seeds"):
            text = text.replace(f"evaluation.{name}", name)
        for name in ("height", "width"):
            text = text.replace(f"evaluation.{name}", f"pipeline.{name}")
        if text == str(error):
            raise
        raise type(error)(text) from error


def _as_text(settings: object) -> object:
    """Return settings with paths as text."""
    if isinstance(settings, dict):
        return {name: _as_text(value) for name, value in settings.items()}
    if isinstance(settings, tuple):
        return list(settings)
    return str(settings) if isinstance(settings, Path) else settings
