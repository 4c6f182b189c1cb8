"""`fluvial train RECIPE --dry-run`: all phases of a training run, from build to checkpoint, without its GPUs."""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from optree import tree_leaves
from rich.console import Console
from torch import Tensor

from fluvial.core.checks import BATCH, GIBIBYTES, check_fields
from fluvial.engines.data.records import texts
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.dryrun.passes import PassRepeater, ShortUpdates
from fluvial.engines.extensions.dryrun.report import CheckpointLayout, Report, draw
from fluvial.engines.extensions.dryrun.stand_ins import PROMPTS, keep_on_host, replace_rewards, shorten
from fluvial.engines.extensions.plan.fit import fit_config
from fluvial.engines.extensions.plan.hours import count_run
from fluvial.engines.extensions.simulate.device import GIB, Accelerator, register
from fluvial.engines.extensions.simulate.simulation import Simulation, simulate
from fluvial.engines.named_models import MODELS
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.declared import BySource
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.weights import find_base_model
from fluvial.engines.run.method import Preferences
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.scoring.runner import RewardRunner
from fluvial.models import is_recorded


def dry_run(
    config: TrainConfig, job: Job | None = None, *, ranks: int = 1, accelerator: Accelerator | None = None, reserve: int = 0
) -> Report:
    """Simulate a training run, and return the report of its memory, traffic, FLOPs and host reads.

    The model is built from its settings alone. One rollout, an update, an evaluation and a checkpoint run on a simulated
    accelerator, as rank 0 of the ranks. Errors of the run are part of the report.

    Args:
        config: configuration of the run.
        job: job to train; by default the one of `config.model`.
        ranks: number of GPUs.
        accelerator: simulated GPU.
        reserve: bytes kept free for what is not simulated.

    Raises:
        UsageError: the configuration is invalid.
    """
    accelerator = accelerator or Accelerator()
    with tempfile.TemporaryDirectory() as name, simulate(ranks=ranks, accelerator=accelerator) as simulation:
        folder, notes = Path(name), list[str]()
        short, scale = shorten(_complete(config, folder, notes, job), folder, ranks=ranks)
        if config.engine.micro_batch == "auto":
            notes.append("trials for micro_batch auto: one sample per pass here, --micro-batch N tries another number")
        if config.engine.update_micro_batch == "auto":
            notes.append("trials for update_micro_batch auto: as many pairs per pass as samples here")
        if config.engine.compiles(torch.device("cuda")):
            notes.append("fusion by the compiler: blocks run as written, so activations are at most as large")
        if config.engine.compile == "reduce-overhead":
            extra = "their inputs, and their pool while images are decoded, come on top (fluvial plan counts both)"
            notes.append(f"CUDA graphs of rollout passes: these run as written, and {extra}")
        run = _Run(simulation, short, scale)
        with warnings.catch_warnings(), patch.object(RewardRunner, "submit", _submit_and_wait(RewardRunner.submit)):
            warnings.simplefilter("ignore")  # they are about values, which are missing here
            error = run.run_phases(job, notes)
        return Report.from_simulation(
            simulation, config, ranks=ranks, accelerator=accelerator, reserve=reserve, notes=notes, error=error,
            stored=run.stored, micro_batches=run.micro_batches, layout=run.layout,
        )  # fmt: skip


def _complete(config: TrainConfig, folder: Path, notes: list[str], job: Job | None = None) -> TrainConfig:
    """Return the run with its rollouts in this process, and with stand-ins for missing prompts and rewards."""
    if config.rollout.is_served:
        notes.append("rollout servers: this rank generates the rollouts itself here")
        config = replace(config, rollout=replace(config.rollout, source=""))
    lacks_prompts = config.model not in MODELS and not config.prompts and not config.data.images
    if lacks_prompts and not isinstance(config.method.source, Preferences):
        by_source = [each for each in config.method.networks().values() if isinstance(each, BySource)]
        files = [folder / f"{source}.txt" for source in (by_source[0].teachers if by_source else ["prompts"])]
        for number, file in enumerate(files):  # as many of each, none twice
            file.write_text("\n".join(PROMPTS[number :: len(files)]) + "\n", encoding="utf-8")
        config = replace(config, prompts=tuple(map(str, files)))
        if job is None and not config.rewards and config.method.is_scored and config.method.needs.rewards is not None:
            notes.append("the reward, which is not named: jpeg stands in; the memory of your own comes on top")
            config = replace(config, rewards=("jpeg",))
    return config


class _Run:
    """Dry run under a simulation; `scale` is the number of samples of the real run per sample here."""

    def __init__(self, simulation: Simulation, config: TrainConfig, scale: float) -> None:
        self.simulation, self.config, self.scale = simulation, config, scale
        self.phase = simulation.phases.enter
        self.stored = self.micro_batches = 0
        self.layout: CheckpointLayout | None = None

    def run_phases(self, job: Job | None, notes: list[str]) -> str | None:
        """Run all phases, and return the error that ended them, if any."""
        phase = "build"
        try:
            with contextlib.ExitStack() as stack:
                with self.phase("build"):
                    trainer = stack.enter_context(self._build_trainer(job, notes))
                updates = self._watch(trainer)
                phase = "rollout and update"
                trainer.update()
                self.micro_batches = round(updates.micro_batches * self.scale)
                phase = "evaluation"
                with self.phase("evaluation"):
                    trainer.evaluate()
                phase = "checkpoint"
                with self.phase("checkpoint"):
                    self.layout = _measure_checkpoint(trainer)
        except UsageError:
            raise
        except Exception as error:
            if "device_ready_queues_" in str(error):  # `simulate` explains it
                raise
            return f"{phase}: {type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def _build_trainer(self, job: Job | None, notes: list[str]) -> Trainer:
        """Return the trainer, with a model whose passes are repeated without being run."""
        world: World = self.simulation.world
        job = jobs.open_configured(self.config) if job is None else job
        stand_ins = set(texts(job.prompts)) <= set(PROMPTS)  # some may be held out
        job, config = replace_rewards(job, self.config, partial(self.phase, "rewards"), notes, prompts=stand_ins)
        model: Any = job.model
        if is_recorded(model):
            keep_on_host(model, world.device)
            notes.append("text encoders and VAE of a pipeline without an adapter: they are on the host here, so add them")
        repeater = PassRepeater(self.simulation.mode)
        model.predict = repeater.wrap_predict(model.predict)
        if hasattr(model, "encode_text"):
            model.encode_text = repeater.wrap_text(model.encode_text)
        model.decode = self._run_in("decode", model.decode)
        return Trainer(config, job, world)

    def _watch(self, trainer: Trainer) -> ShortUpdates:
        """Assign the parts of a trainer to their phases, and shorten its updates."""
        sampler, engine = trainer.sampler, trainer.engine
        generate = self._run_in("rollout", sampler.generate)

        def store(*args: Any, **kwargs: Any) -> Any:
            batch = generate(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
            self.stored = int(sum(storages.values()) * (self.scale - 1))
            return batch

        updates = ShortUpdates(engine)
        changes: list[tuple[Any, str, Callable[..., Any]]] = [
            (sampler, "generate", store),
            (trainer, "learn", self._run_in("update", trainer.learn)),
            (engine, "update", updates),
        ]
        if trainer.ahead is not None:
            changes.append((trainer.ahead, "next", _wait_for_requested(trainer.ahead)))
        for owner, name, function in changes:
            setattr(owner, name, function)
        return updates

    def _run_in(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return run


def _submit_and_wait(submit: Callable[..., None]) -> Callable[..., None]:
    """Return a `RewardRunner.submit` that waits for the scores, so that phases do not interleave."""

    def submit_and_wait(runner: RewardRunner, *args: Any, **kwargs: Any) -> None:
        submit(runner, *args, **kwargs)
        for future, _ in runner.waiting:
            future.exception()

    return submit_and_wait


def _wait_for_requested(ahead: Any) -> Callable[[], Any]:
    """Return a `RolloutPrefetcher.next` that waits for all requested rollouts, so that phases do not interleave."""
    take_next = ahead.next

    def next_rollout() -> Any:
        batch = take_next()
        for requested in ahead.requested.values():
            requested.made.result()
        return batch

    return next_rollout


def _measure_checkpoint(trainer: Trainer) -> CheckpointLayout:
    """Return the sizes of a checkpoint, and gather the weights as the final export does."""
    state = trainer.saver.state()
    whole = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    share = -(-whole // trainer.world.size)  # replicated tensors are written by the rank that has written least
    exported, largest = 0, 0
    for _, tensor in trainer.engine.weights(merge=trainer.config.train == "lora"):
        exported += tensor.numel() * tensor.itemsize
        largest = max(largest, tensor.numel() * tensor.itemsize)
    return CheckpointLayout(len(state), share, whole, exported, largest)


@dataclass(frozen=True)
class DryRunConfig:
    """Run every phase of a training run on a simulated GPU, and report memory, traffic, FLOPs and host reads.

    Args:
        as_gpus: Number of GPUs.
        gpu: Name of the GPU as its driver reports it, for its peak FLOP/s.
        gpu_memory_gib: Memory of a GPU, in GiB.
        reserve_gib: Memory kept free for what is not simulated, in GiB.
        report: Folder for the report as dry-run.json and memory.svg; None only prints it.
    """

    as_gpus: int = 1
    gpu: str = "NVIDIA H100 80GB HBM3"
    gpu_memory_gib: float = 80.0
    reserve_gib: float = 6.0
    report: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", as_gpus=BATCH, gpu_memory_gib=GIBIBYTES, reserve_gib=GIBIBYTES)


def run(options: DryRunConfig, config: TrainConfig, *, console: Console) -> None:
    """Print the report of a dry run, and write it to `options.report` if that is set.

    Raises:
        RunError: the run does not fit, or an error ended it.
    """
    register()  # before the backward passes of the closed form
    config, savings = fit_config(config, ranks=options.as_gpus, device=torch.device("cuda"), gpu=options.gpu)
    if savings is not None:
        console.print(savings, highlight=False)
    with contextlib.suppress(UsageError):  # the inputs of networks without an adapter are known only at run time
        console.print(f"the run: {count_run(config, find_base_model(config.model))}", highlight=False, soft_wrap=True)
    gpu = Accelerator(options.gpu, int(options.gpu_memory_gib * GIB))
    report = dry_run(config, ranks=options.as_gpus, accelerator=gpu, reserve=int(options.reserve_gib * GIB))
    report.show(console)
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        (options.report / "dry-run.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        draw(report, options.report / "memory.svg")
    if report.error is not None:
        raise RunError(f"the dry run ended in the phase {report.error}")
    if not report.fits:
        room = options.gpu_memory_gib - options.reserve_gib
        raise RunError(f"the run does not fit: it takes {report.peak / GIB:.2f} of {room:g} GiB")
