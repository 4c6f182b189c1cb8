"""A training run driven from Python: build, update, evaluate, save and export."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.engine.config import DTYPES
from fluvial.engines.engine.world import World, collective, init_world
from fluvial.engines.errors import UsageError
from fluvial.engines.export.model_folder import export, write_lora
from fluvial.engines.run import job as jobs
from fluvial.engines.run.build import build_parts
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.evaluation.evaluate import Evaluation, evaluate
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.evaluated import with_job_size
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.loop import Loop
from fluvial.engines.run.monitoring.diagnostics import Probe
from fluvial.engines.run.passes.micro_batch import WarmUp
from fluvial.engines.run.passes.probe import compile_blocks
from fluvial.engines.run.process.stop import StopRequest
from fluvial.engines.run.saving import Progress, Saver
from fluvial.engines.sampling.solvers import serving_solver
from fluvial.models.device import use_deterministic_algorithms


class Trainer(Loop):
    """A training run driven batch by batch.

        with Trainer(config, job) as trainer:
            for record in trainer:
                print(record["update"], record["reward"]["mean"])
            trainer.export(Path("trained"))

    Files are written only by `save` and `export`. `train` adds run folder, evaluations, checkpoints and restarts. If
    `engine.micro_batch` is auto, the trainer's `config` has the chosen number. `pairs` has the sizes that
    `engine.update_micro_batch` auto chose, largest first; `choices` has the measurements behind both.

    Args:
        job: job to train; by default that of `config.model`.
        world: process group; by default one is opened, and closed with the trainer.
        console: console for messages about checkpoints; None is silent.
        stop: request to stop, checked after each rollout.
        resume_from: checkpoint of this run to continue from.

    Raises:
        UsageError: the configuration does not fit the job or the machine.
    """

    def __init__(
        self,
        config: TrainConfig,
        job: Job | None = None,
        world: World | None = None,
        *,
        console: Console | None = None,
        stop: StopRequest | None = None,
        resume_from: Path | str | None = None,
    ) -> None:
        config = config if job is not None else jobs.from_run(config)
        with ExitStack() as stack:
            stack.enter_context(use_deterministic_algorithms(config.engine.deterministic))
            if world is None:
                if torch.distributed.is_initialized():
                    raise UsageError("trainer: a process group is open already: pass the world of init_world()")
                world = stack.enter_context(init_world(timeout=config.engine.timeout))
            self.world = world = world.group_ranks(config.engine.context_parallel)
            with world.agreed():
                if job is not None:
                    job = jobs.open_for_run(config, job)
                    config = replace(config, pipeline=with_job_size(job, config.pipeline))
                savings = None  # table of the memory that each chosen setting saves
                if config.engine.fit is not None:
                    config, savings = plugins.load("fit", "extensions")(config, ranks=world.size, device=world.device)
            if savings is not None and console is not None and world.is_main:
                console.print(savings, highlight=False)
            if job is None:
                with world.agreed():
                    job = jobs.open_configured(config)
            self.stop, progress = StopRequest() if stop is None else stop, Progress()
            parts = build_parts(config, job, world, progress, stop=self.stop.__bool__, resume_from=resume_from)
            run, self.choices, self.evaluated = parts.run, parts.choices, parts.evaluated
            self.schedule, self.evaluation_schedule = parts.schedule, parts.evaluation_schedule
            self.job, self.pairs, self.sampler = run.job, run.pairs, run.sampler
            self.rewards, self.runners = run.rewards, run.runners
            stack.callback(self.runners.close)
            stack.callback(self.sampler.source.close)
            if parts.ahead is not None:
                stack.callback(parts.ahead.close)
            self.saver = Saver(run, parts.base, console=console, ahead=parts.ahead)
            stack.callback(self.saver.close)
            self.console = console
            self.stop.call_on_stop(self.sampler.source.hurry)
            progress = progress if resume_from is None else self.saver.restore(resume_from)
            super().__init__(run, parts.ahead, progress)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def close(self) -> None:
        """End the reward threads, wait for a background checkpoint, and close the world if it was opened here."""
        self._stack.close()

    @collective
    def evaluate(
        self,
        samples: int | None = None,
        *,
        keep: Callable[[Sequence[str], Tensor], None] | None = None,
        probe: Probe | None = None,
    ) -> Evaluation:
        """Evaluate held-out prompts.

        Args:
            samples: number of samples, by default `evaluation.samples` of the run.
            keep: called with the names and images of each chunk of this rank.
            probe: probe of the model at the start, to measure the drift from it.
        """
        config, self.phase = self.config, "evaluation"
        with self.engine.inference(average=config.evaluation.average) as module:
            result = evaluate(
                self.evaluated,
                module,
                schedule=self.evaluation_schedule,
                samples=samples or config.evaluation.samples,
                seeds=config.evaluation.seeds,
                micro_batch=config.evaluation_pass,
                world=self.world,
                guidance=config.evaluation_guidance,
                keep=keep,
                solver=serving_solver(config.evaluation.solver, self.evaluated.model, config.method),
                max_invalid=config.rollout.max_invalid,
            )
            if probe is not None:
                drift = probe.measure_drift(self.job, module, micro_batch=config.largest_pass)
                result = result._replace(velocity_drift=drift)
        return result

    @collective
    def warm_up(self, progress: RunProgress | None = None) -> WarmUp | None:
        """Compile the blocks now instead of in the first rollout; None if they are not compiled.

        Raises:
            UsageError: the blocks cannot be compiled, and `engine.compile` is True.
        """
        if not self.engine.compiles:
            return None
        return compile_blocks(self.config, self.job, self.engine, self.schedule, self.pairs, progress=progress)

    def save(self, *, ends: bool = False) -> None:
        """Write a checkpoint to `config.checkpoint_folder`, unless this update already has one.

        Args:
            ends: the process ends soon; see `Saver.save`.
        """
        self.phase = "checkpoint"
        self.saver.save(self.progress, ends=ends)

    @collective
    def save_finished(self) -> bool:
        """Write the state after the last complete batch, after an error in a later one, and return whether it was possible.

        It is impossible if the error came between the optimizer updates of a batch or in an optimizer step: the weights have
        changed since. Prefetched rollouts are left out.
        """
        updates, progress = self.finished
        networks = self.run.networks
        engines = self.engine, *networks.trained.values()
        if networks.updates != updates or any(engine.stepping for engine in engines):
            return False
        for engine in engines:
            engine.optimizer.zero_grad()
            engine.sharded.reshard()
            engine.onload()
        networks.onload()
        self.saver.save_alone(progress)
        return True

    def resume(self, path: Path | str) -> None:
        """Continue from a checkpoint of this run, to the same bits as without the interruption.

        Micro-batch sizes stay those of this trainer (`pairs`); if the run had others, results differ by rounding.
        """
        self.restore(self.saver.restore(path))

    def export(self, folder: Path) -> None:
        """Write the weights to `folder / "weights"`, and an adapter also to `folder / "lora"`; see `evaluation.average`."""
        self.phase = "export"
        average = self.engine.read_average() if self.config.evaluation.average else None
        lora, dtype = self.config.train == "lora", DTYPES[self.config.export.dtype]
        export(self.engine.module, folder / "weights", merge=lora, average=average, dtype=dtype, world=self.world)
        if lora:
            write_lora(self.engine.module, folder / "lora", average=average, dtype=dtype, world=self.world)
