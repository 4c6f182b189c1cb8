"""Training: samples -> rewards -> update, a rollout at a time; and whole runs with folder, evaluations and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.evaluation.evaluate import Evaluation, evaluate
from fluvial.engines.fsdp.config import DTYPES
from fluvial.engines.fsdp.determinism import deterministic
from fluvial.engines.fsdp.engine import UpdateInfo
from fluvial.engines.fsdp.export import export, write_lora
from fluvial.engines.fsdp.parallelize import compiled_programs
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.plan.micro_batch import Choice
from fluvial.engines.plan.warm_up import WarmUp
from fluvial.engines.report import trackers
from fluvial.engines.report.progress import RunProgress
from fluvial.engines.rewards.constraint import free_weights, learnt_weights, updated
from fluvial.engines.rewards.gathering import Rewards, gather_rewards
from fluvial.engines.rollout.solvers import serving_solver
from fluvial.engines.run import restart, run_folder
from fluvial.engines.run.run_folder import RunFolder
from fluvial.engines.run.stop import StopRequest, stop_request
from fluvial.engines.sources.handshake import Handshake
from fluvial.engines.train import job as jobs
from fluvial.engines.train import metrics
from fluvial.engines.train.build import build_parts
from fluvial.engines.train.config import TrainConfig
from fluvial.engines.train.job import Job
from fluvial.engines.train.learner import Learnt
from fluvial.engines.train.loop import Loop
from fluvial.engines.train.monitoring import signal
from fluvial.engines.train.monitoring.diagnostics import Probe, diversity
from fluvial.engines.train.passes import choose_micro_batch, compile_blocks, notes
from fluvial.engines.train.record import as_record
from fluvial.engines.train.saving import Progress, Saver


class Trainer:
    """A training run that is driven update by update.

        with Trainer(config, job) as trainer:
            for record in trainer:
                print(record["update"], record["reward"]["mean"])
            trainer.export(Path("trained"))

    Nothing is written unless `save` or `export` is called. `train` is the loop with run folder, evaluations, checkpoints
    and restarts.

    Args:
        config: the run.
        job: what is trained; by default what `config.model` names.
        world: process group; by default one is opened, and closed with the trainer.
        console: where the progress of checkpoints is shown; None is silent.

    Raises:
        UsageError: the run cannot be done as configured.
    """

    def __init__(
        self, config: TrainConfig, job: Job | None = None, world: World | None = None, *, console: Console | None = None
    ) -> None:
        self.config = config = config if job is not None else jobs.from_run(config)
        self.console = console
        with ExitStack() as stack:
            if world is None:
                world = _opened_world(config, stack)
            self.world = world = world.grouped(config.engine.context_parallel)
            if job is None:
                with world.agreed():
                    job = jobs.of_run(config)
            parts = build_parts(config, job, world)
            self.job, self.evaluated = parts.job, parts.evaluated
            self.engine, self.policies = parts.engine, parts.policies
            self.schedule, self.evaluation_schedule = parts.schedule, parts.evaluation_schedule
            self.rollouts, self.learner, self.preferences = parts.rollouts, parts.learner, parts.preferences
            self.ahead = parts.ahead
            self.saver = Saver(
                config, self.engine, world, prompts=self.job.prompts, base=parts.base, console=console, ahead=parts.ahead
            )
            self.rewards, self.runners = parts.rewards, parts.runners
            stack.callback(self.runners.close)
            stack.callback(parts.source.close)
            if self.ahead is not None:
                stack.callback(self.ahead.close)
            stack.callback(self.saver.close)
            self.progress, self.probe, self._is_open = Progress(), None, config.micro_batch == "auto"
            self.learner.remember_in(self.progress.rewards)
            self.stop, self.stopping = StopRequest(), False
            self._stack = stack.pop_all()

    probe: Probe | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def close(self) -> None:
        """End the reward threads, wait for a checkpoint that is being written, and close the world if it was opened here."""
        self._stack.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the record of each rollout and its updates, until the last update or a request to stop."""
        while self.engine.updates < self.config.updates and not self.stopping:
            yield self.update()

    def update(self) -> dict[str, Any]:
        """Make one rollout and its optimizer updates, and return their record; every rank must take part.

        Raises:
            RunError: a reward failed, or rollout and update do not compute the same policy.
        """
        self.greet()
        programs = compiled_programs() if self.engine.compiles else 0
        root = fold_in(key(self.config.seed), self.engine.updates)
        rollouts = self.engine.updates // self.config.updates_per_rollout
        seconds: dict[str, float] = {}
        asked = [] if self.preferences or self.ahead else self.rollouts.prompts(root, self.engine.updates)
        learnt, rewards, spread = self._learn(root, asked, seconds)
        if self.config.followers:
            with metrics.timed(seconds, "update"):
                self.policies.follow(self.engine, rollouts + 1)
        samples = 2 * self.config.rollout.prompts if self.preferences else self.config.rollout.batch
        self.progress.samples += samples
        for phase, spent in seconds.items():
            self.progress.seconds[phase] += spent
        self._watch_ratio(learnt.updates[0])
        dtype, floors = self.config.engine.compute_dtype(self.world.device), self.config.advantage.floor_of
        record: dict[str, Any] = {
            "update": self.engine.updates,
            "samples": self.progress.samples,
            **metrics.learnt_record(learnt, self.learner.texts.padding, self.rollouts.size),
            **signal.parts_record(learnt.updates[-1].parts, steps=self.config.objective.traits.trains_on == "steps"),
            **metrics.reward_record(
                rewards,
                free_weights(self.runners.weights, list(self.rewards), floors),
                list(self.rewards),
                asked if self.ahead is None else self.ahead.current.asked,
                group=self.config.rollout.group,
            ),
            **({} if self.ahead is None else {"staleness": self.ahead.staleness()}),
            **({"multipliers": dict(self.progress.multipliers)} if floors else {}),
            **(signal.advantage_record(learnt.advantage) if self.rewards else {}),
            "speed": metrics.speed(
                learnt.updates,
                seconds,
                samples,
                device=self.world.device,
                dtype=dtype,
                rewards=rewards if self.rewards else None,
            ),
            "memory": metrics.memory(learnt.updates[-1]),
            "skipped_steps": self.engine.skipped,
            "seconds": seconds,
        }
        if self.engine.compiles:
            record["compiled_programs"] = compiled_programs() - programs
        return record if spread is None else {**record, "diversity": spread}

    def evaluate(
        self, samples: int | None = None, *, keep: Callable[[Sequence[str], Tensor], None] | None = None
    ) -> Evaluation:
        """Return the scores of held-out prompts; every rank must take part.

        Args:
            samples: number of samples, by default `config.eval_samples`.
            keep: function of the names and the images of each chunk of this rank.
        """
        self.settle()
        config = self.config
        with self.engine.inference(average=config.evaluation.average) as module:
            result = evaluate(
                self.evaluated, module, schedule=self.evaluation_schedule, samples=samples or config.eval_samples,
                seeds=config.evaluation.seeds, micro_batch=config.samples_per_pass, world=self.world,
                guidance=config.evaluation_guidance, keep=keep,
                solver=serving_solver(config.evaluation.solver, self.evaluated.model), max_invalid=config.max_invalid,
            )  # fmt: skip
            if self.probe is not None:
                drift = self.probe.velocity_drift(self.job, module, micro_batch=config.samples_per_pass)
                result = result._replace(velocity_drift=drift)
        return result

    def settle(self) -> Choice | None:
        """Choose `config.micro_batch` where it is auto, and return why; every rank must take part.

        A run that is resumed takes the number of its checkpoint, and returns None, as one with a number of its own does.

        Raises:
            UsageError: the passes of a single sample do not fit into the memory.
        """
        if self.config.micro_batch != "auto":
            return None
        choice = choose_micro_batch(self.config, self.job, self.engine, self.schedule)
        self._take(choice.micro_batch)
        return choice

    def warm_up(self, progress: RunProgress | None = None) -> WarmUp | None:
        """Let the blocks compile now, if they are compiled at all, and not in the first rollout; every rank must take part.

        Raises:
            UsageError: they cannot be compiled, and `engine.compile` is True.
        """
        if not self.engine.compiles:
            return None
        self.settle()
        return compile_blocks(self.config, self.job, self.engine, self.schedule, progress=progress)

    def greet(self) -> Handshake | None:
        """Compare servers that make the samples with the trainer, once, see `Rollouts.greet`; every rank must take part."""
        self.settle()
        return self.rollouts.greet()

    def _take(self, micro_batch: int) -> None:
        """Set the number of samples per forward pass."""
        self.config = replace(self.config, micro_batch=micro_batch)
        self.rollouts.config = self.learner.config = self.saver.config = self.config

    def save(self) -> None:
        """Write a checkpoint to `config.checkpoint_folder`, unless this update already has one."""
        self.saver.save(self.progress)

    def resume(self, path: Path | str) -> None:
        """Continue from a checkpoint of this run; what follows is the same to the bit as without the interruption."""
        if self._is_open:
            self._take(checkpoint.setting(path, "micro_batch", world=self.world))
        self.progress = self.saver.restore(path)
        self.learner.remember_in(self.progress.rewards)

    def export(self, folder: Path) -> None:
        """Write the moving average of the weights to `folder / "weights"`, and of the adapter to `folder / "lora"`."""
        written: dict[str, Any] = {
            "average": self.engine.averaged() if self.config.evaluation.average else None,
            "dtype": DTYPES[self.config.export_dtype], "world": self.world,
        }  # fmt: skip
        lora = self.config.train == "lora"
        export(self.engine.module, folder / "weights", merge=lora, **written)
        if lora:
            write_lora(self.engine.module, folder / "lora", **written)

    def _learn(self, root: Key, asked: list[str], seconds: dict[str, float]) -> tuple[Learnt, Rewards, float | None]:
        """Make a rollout and its updates; return what was learnt, the rewards and the diversity of the samples."""
        if self.preferences:
            with metrics.timed(seconds, "rollout"):
                chosen = self.rollouts.preferences(root, self.preferences)
            with metrics.timed(seconds, "reward"):
                rewards = self._rewards()
            with metrics.timed(seconds, "update"):
                work = self.learner.preference_items(chosen, list(range(len(chosen))), root)
                return self.learner.update(work, root), rewards, None
        with metrics.timed(seconds, "rollout"):
            batch = self.ahead.next() if self.ahead else self.rollouts.samples(root, asked, self.runners)
        with metrics.timed(seconds, "reward"):
            if self.config.engine.offload == "phases" and self.config.makes_samples:
                self.engine.offload()
            rewards = self._rewards()
            spread = None if batch.thumbnails is None else self._diversity(batch.thumbnails)
            self.engine.onload()
            self.policies.onload()
        with metrics.timed(seconds, "update"):
            work = self.learner.items(batch, rewards.scores, self._weights(rewards), root)
            del batch  # the items are a copy of its trajectory
            return self.learner.update(work, root), rewards, spread

    def _rewards(self) -> Rewards:
        """Return the rewards of all samples, and note whether any rank was asked to stop; every rank must take part.

        Raises:
            RunError: too many groups have no valid reward.
        """
        if self.ahead is None:
            self.runners.exchange(self.world)
            with self.world.agreed():
                own = self.runners.collect(batch=self.config.rollout.batch)
        else:
            own = self.ahead.collect()
        rewards, self.stopping = gather_rewards(
            own, stop=bool(self.stop), group=self.config.rollout.group, max_invalid=self.config.max_invalid, world=self.world
        )
        return rewards

    def _weights(self, rewards: Rewards) -> Tensor:
        """Return the weight of each reward in the advantages; one with a floor has its multiplier, after this rollout."""
        config, names, weights = self.config.advantage, list(self.rewards), self.runners.weights
        if not config.floors:
            return weights
        means = dict(zip(names, rewards.scores[rewards.kept].double().mean(0).tolist(), strict=True))
        known = self.progress.multipliers
        self.progress.multipliers = updated(known, means, config.floor_of, lr=config.floor_lr, most=config.floor_max)
        return learnt_weights(weights, names, self.progress.multipliers)

    def _diversity(self, thumbnails: Tensor) -> float | None:
        """Return the distance between the samples of a group, see `diagnostics.diversity`; None for groups of one."""
        rollout = self.config.rollout
        everyone = self.world.gather_data(thumbnails)[: rollout.batch]
        return diversity(everyone, rollout.group) if rollout.group > 1 else None

    def _watch_ratio(self, info: UpdateInfo) -> None:
        """Keep the largest |log ratio| of a first pass, which is 0 unless rollout and update disagree about the policy.

        Raises:
            RunError: it is above `config.max_log_ratio`.
        """
        if "log_ratio" not in info.max_abs:
            return
        largest, bound, known = info.max_abs["log_ratio"], self.config.max_log_ratio, self.progress.max_log_ratio
        self.progress.max_log_ratio = max(known, largest) if largest == largest else largest
        if not largest <= bound and not info.skipped:  # NaN too
            raise RunError(
                f"update {self.engine.updates}: the first pass has a |log ratio| of {largest:.2g}, above max_log_ratio "
                f"{bound:g}: rollout and update do not compute the same policy; where that is meant, set correction.mode to "
                "truncate"
            )


def train(config: TrainConfig, job: Job | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Run a training job to its end, or until it is asked to stop, and return its summary (empty if stopped early).

    The run folder `config.out` receives metrics, images, checkpoints, the trained weights and the summary.

    Args:
        config: the run.
        job: what is trained; by default what `config.model` names.
        console: where progress is shown; None is silent.

    Raises:
        UsageError: the run cannot be done as configured.
        RunError: it cannot go on.
    """
    deterministically = deterministic(config.engine.deterministic)
    with deterministically, init_world(timeout=config.collective_timeout) as world, stop_request() as stop:
        config = _restarted(config if job is not None else jobs.from_run(config), world, console)
        with world.agreed():
            trackers.find(config.tracker)  # before anything is written
            if job is None:
                job = jobs.of_run(config)
            if world.is_main:
                run_folder.claim(config.out, resume=config.resume or config.resume_from is not None)
        with Trainer(config, job, world, console=console if world.is_main else None) as trainer:
            saved = checkpoint.listed(config.checkpoint_folder)
            if config.resume_from is not None:
                trainer.resume(config.resume_from)
            elif config.resume and saved:  # a run that died before its first checkpoint starts from the beginning
                trainer.resume(saved[-1])
            trainer.stop = stop
            choice = trainer.settle()
            record = as_record(trainer.config)  # with the micro-batch that was chosen
            with ExitStack() as stack:
                done, folder = trainer.engine.updates, None
                progress = stack.enter_context(RunProgress(trainer.console, total=config.updates, done=done))
                if world.is_main:
                    folder = RunFolder(config.out, record, update=done, tracker=config.tracker, say=progress.say)
                    stack.callback(folder.close)
                    stack.enter_context(folder.keeping_warnings())
                for note in notes(trainer.config, trainer.engine):
                    progress.say(note)
                if choice is not None:
                    progress.say(str(choice))
                    if folder:
                        folder.log({"update": done, "micro_batch": choice.record})
                if (compiled := trainer.warm_up(progress)) is not None:
                    progress.say(str(compiled))
                if (met := trainer.greet()) is not None:
                    progress.say(str(met))
                    if folder:
                        folder.log({"update": done, "handshake": met.record})
                return Loop(trainer, folder, progress).run()


def _opened_world(config: TrainConfig, stack: ExitStack) -> World:
    """Return a world that is closed with the stack.

    Raises:
        UsageError: one is open.
    """
    if torch.distributed.is_initialized():
        raise UsageError("trainer: a process group is open already: pass the world of init_world()")
    stack.enter_context(deterministic(config.engine.deterministic))
    return stack.enter_context(init_world(timeout=config.collective_timeout))


def _restarted(config: TrainConfig, world: World, console: Console | None) -> TrainConfig:
    """Return the run as it goes on if torchrun has started it before, else as it is configured."""
    found = restart.restarted(config.out, config.checkpoint_folder, world, console=console)
    if found is None:
        return config
    return replace(config, resume=True, resume_from=config.resume_from if found.checkpoint is None else found.checkpoint)
