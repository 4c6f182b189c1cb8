"""`fluvial train RECIPE --dry-run`: the phases of one training run, from build to checkpoint, without its GPUs."""

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
from fluvial.engines.extensions.dryrun.passes import Repeated, ShortUpdates
from fluvial.engines.extensions.dryrun.report import CheckpointLayout, Report, draw
from fluvial.engines.extensions.dryrun.stand_ins import PROMPTS, keep_on_host, shorten, with_rewards
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
    """Return what a training run would do on its GPUs, found without them.

    The model is built from its settings alone. One rollout runs, an update, an evaluation, and what a checkpoint holds; all
    of it on a simulated accelerator, as rank 0 of the ranks. Errors of the run are part of the report.

    Args:
        config: the run.
        job: what is trained; by default what `config.model` names.
        ranks: number of GPUs.
        accelerator: the GPU.
        reserve: bytes that must stay free for what is not simulated.

    Raises:
        UsageError: the run cannot be done as configured.
    """
    accelerator = accelerator or Accelerator()
    with tempfile.TemporaryDirectory() as name, simulate(ranks=ranks, accelerator=accelerator) as simulation:
        folder, notes = Path(name), list[str]()
        changed, more = shorten(_complete(config, folder, notes, job), folder, ranks=ranks)
        if config.engine.micro_batch == "auto":
            notes.append("trials for micro_batch auto: one sample per pass here, --micro-batch N tries another number")
        if config.engine.update_micro_batch == "auto":
            notes.append("trials for update_micro_batch auto: as many pairs per pass as samples here")
        if config.engine.compiles(torch.device("cuda")):
            notes.append("fusion by the compiler: blocks run as written, so activations are at most as large")
        if config.engine.compile == "reduce-overhead":
            says = "their inputs, and their pool while images are decoded, come on top (fluvial plan counts both)"
            notes.append(f"CUDA graphs of rollout passes: these run as written, and {says}")
        run = _Run(simulation, changed, more)
        with warnings.catch_warnings(), patch.object(RewardRunner, "submit", _submit_and_wait(RewardRunner.submit)):
            warnings.simplefilter("ignore")  # of values that are not there
            error = run.all(job, notes)
        return Report.of(
            simulation, config, ranks=ranks, accelerator=accelerator, reserve=reserve, notes=notes, error=error,
            stored=run.stored, micro_batches=run.micro_batches, layout=run.layout,
        )  # fmt: skip


def _complete(config: TrainConfig, folder: Path, notes: list[str], job: Job | None = None) -> TrainConfig:
    """Return the run with prompts, and a reward, where it names neither, in this process alone."""
    if config.rollout.is_served:
        notes.append("servers that make the rollouts: this rank makes them itself here")
        config = replace(config, rollout=replace(config.rollout, source=""))
    needs = config.model not in MODELS and not config.prompts and not config.data.images
    if needs and not isinstance(config.method.source, Preferences):
        by_source = [each for each in config.method.networks().values() if isinstance(each, BySource)]
        files = [folder / f"{source}.txt" for source in (by_source[0].teachers if by_source else ["prompts"])]
        for number, file in enumerate(files):  # as many of each, none twice
            file.write_text("\n".join(PROMPTS[number :: len(files)]) + "\n", encoding="utf-8")
        config = replace(config, prompts=tuple(map(str, files)))
        if job is None and not config.rewards and config.method.is_scored and config.method.needs.rewards is not None:
            notes.append("the reward, which is not named: jpeg stands in, and the memory of your own comes on top")
            config = replace(config, rewards=("jpeg",))
    return config


class _Run:
    """One dry run under a simulation."""

    def __init__(self, simulation: Simulation, config: TrainConfig, more: float) -> None:
        self.simulation, self.config, self.more = simulation, config, more
        self.phase = simulation.phases.of
        self.stored = self.micro_batches = 0
        self.layout: CheckpointLayout | None = None

    def all(self, job: Job | None, notes: list[str]) -> str | None:
        """Run every phase, and return what ended it, if something did."""
        phase = "build"
        try:
            with contextlib.ExitStack() as stack:
                with self.phase("build"):
                    trainer = stack.enter_context(self._built(job, notes))
                updates = self._watch(trainer)
                phase = "rollout and update"
                trainer.update()
                self.micro_batches = round(updates.micro_batches * self.more)
                phase = "evaluation"
                with self.phase("evaluation"):
                    trainer.evaluate()
                phase = "checkpoint"
                with self.phase("checkpoint"):
                    self.layout = _layout(trainer)
        except UsageError:
            raise
        except Exception as error:
            if "device_ready_queues_" in str(error):  # the simulation explains it
                raise
            return f"{phase}: {type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def _built(self, job: Job | None, notes: list[str]) -> Trainer:
        """Return the trainer, whose model repeats its passes on paper."""
        world: World = self.simulation.world
        job = jobs.open_configured(self.config) if job is None else job
        stand_ins = set(texts(job.prompts)) <= set(PROMPTS)  # some may be held out
        job, config = with_rewards(job, self.config, partial(self.phase, "rewards"), notes, prompts=stand_ins)
        model: Any = job.model
        if is_recorded(model):
            keep_on_host(model, world.device)
            notes.append("text encoders and VAE of a pipeline without an adapter, which are on the host here: add them")
        repeated = Repeated(self.simulation.mode)
        model.predict = repeated.predict(model.predict)
        if hasattr(model, "text"):
            model.text = repeated.text(model.text)
        model.decode = self._in("decode", model.decode)
        return Trainer(config, job, world)

    def _watch(self, trainer: Trainer) -> ShortUpdates:
        """Run the parts of a trainer in their phases."""
        sampler, engine = trainer.sampler, trainer.engine
        generate = self._in("rollout", sampler.generate)

        def store(*args: Any, **kwargs: Any) -> Any:
            batch = generate(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            once = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
            self.stored = int(sum(once.values()) * (self.more - 1))
            return batch

        updates = ShortUpdates(engine)
        changes: list[tuple[Any, str, Callable[..., Any]]] = [
            (sampler, "generate", store),
            (trainer, "learn", self._in("update", trainer.learn)),
            (engine, "update", updates),
        ]
        if trainer.ahead is not None:
            changes.append((trainer.ahead, "next", _one_after_another(trainer.ahead)))
        for owner, name, function in changes:
            setattr(owner, name, function)
        return updates

    def _in(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return run


def _submit_and_wait(submit: Callable[..., None]) -> Callable[..., None]:
    """Return `RewardRunner.submit` that waits for the scores: rewards do not interleave with a rollout or an evaluation."""

    def submit_and_wait(runner: RewardRunner, *args: Any, **kwargs: Any) -> None:
        submit(runner, *args, **kwargs)
        for future, _ in runner.waiting:
            future.exception()

    return submit_and_wait


def _one_after_another(ahead: Any) -> Callable[[], Any]:
    """Return `RolloutPrefetcher.next` waiting for all rollouts under way, which then do not interleave with the update."""
    following = ahead.next

    def next_rollout() -> Any:
        batch = following()
        for requested in ahead.requested.values():
            requested.made.result()
        return batch

    return next_rollout


def _layout(trainer: Trainer) -> CheckpointLayout:
    """Return what a checkpoint holds, and gather the weights as the export at the end does."""
    state = trainer.saver.state()
    whole = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    share = -(-whole // trainer.world.size)  # what several ranks hold is written by the one that has written least
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
        gpu: Name of the GPU as its driver has it, for its peak FLOP/s.
        gpu_memory_gib: Memory of a GPU, in GiB.
        reserve_gib: Memory kept free for what is not simulated, in GiB.
        report: Folder where the report is written, as dry-run.json and memory.svg; None only prints it.
    """

    as_gpus: int = 1
    gpu: str = "NVIDIA H100 80GB HBM3"
    gpu_memory_gib: float = 80.0
    reserve_gib: float = 6.0
    report: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", as_gpus=BATCH, gpu_memory_gib=GIBIBYTES, reserve_gib=GIBIBYTES)


def run(asked: DryRunConfig, config: TrainConfig, *, console: Console) -> None:
    """Print the report of a dry run, and write it where a folder is named.

    Raises:
        RunError: the run does not fit, or an error ended it.
    """
    register()  # before the backward passes of the closed form
    config, saved = fit_config(config, ranks=asked.as_gpus, device=torch.device("cuda"), gpu=asked.gpu)
    if saved is not None:
        console.print(saved, highlight=False)
    with contextlib.suppress(UsageError):  # the inputs of networks without an adapter are known only as they run
        console.print(f"the run: {count_run(config, find_base_model(config.model))}", highlight=False, soft_wrap=True)
    gpu = Accelerator(asked.gpu, int(asked.gpu_memory_gib * GIB))
    report = dry_run(config, ranks=asked.as_gpus, accelerator=gpu, reserve=int(asked.reserve_gib * GIB))
    report.show(console)
    if asked.report is not None:
        asked.report.mkdir(parents=True, exist_ok=True)
        (asked.report / "dry-run.json").write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
        draw(report, asked.report / "memory.svg")
    if report.error is not None:
        raise RunError(f"the dry run ended in the phase {report.error}")
    if not report.fits:
        raise RunError(f"the run does not fit: {report.peak / GIB:.2f} of {asked.gpu_memory_gib - asked.reserve_gib:g} GiB")
