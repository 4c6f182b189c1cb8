"""Whole runs in a run folder: batches, with evaluations, records, images and checkpoints between them."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from fluvial.engines import plugins
from fluvial.engines.data.records import texts
from fluvial.engines.engine.world import World, collective, init_world
from fluvial.engines.errors import FluvialError, LostProcessError, RunError, UsageError, convert_errors, is_out_of_memory
from fluvial.engines.run import exports, metrics
from fluvial.engines.run import job as jobs
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.checkpoint.storage import open_store
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.evaluation.evaluate import Evaluation
from fluvial.engines.run.evaluation.table import as_records, list_rows
from fluvial.engines.run.job import Job
from fluvial.engines.run.log import images, trackers
from fluvial.engines.run.log.progress import RunProgress
from fluvial.engines.run.log.records import read_json
from fluvial.engines.run.monitoring import diagnostics
from fluvial.engines.run.monitoring.diagnostics import EvaluationPoint, KeptImages, Probe
from fluvial.engines.run.monitoring.expected import describe_run, describe_spread, estimate_seconds
from fluvial.engines.run.process import run_folder
from fluvial.engines.run.process.heap import keep_freed_memory
from fluvial.engines.run.process.run_folder import FolderLock, RunFolder
from fluvial.engines.run.process.stop import catch_stop_signals
from fluvial.engines.run.record import as_record, with_absolute_paths
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.scoring.gather import AbandonedRolloutError
from fluvial.engines.waits import format_seconds, wait_for

EXTREMES = 8  # best and worst samples that a report shows


def run(config: TrainConfig, job: Job | None, *, console: Console | None) -> dict[str, Any]:
    """Run a training job, see `fluvial.engines.run.train`."""
    keep_freed_memory()
    with init_world(timeout=config.engine.timeout) as world, catch_stop_signals() as stop, ExitStack() as holds:
        progress = holds.enter_context(RunProgress(console if world.is_main else None, total=config.updates))
        configured = config if job is not None else jobs.from_run(config)
        config = _resume_restarted(configured, world)
        with world.agreed():
            trackers.find_trackers(config.tracker)  # before anything is written
            for group in ("reports", "curves"):
                plugins.load_all(group)
            open_store(config.checkpoint_folder)
            with wait_for(f"opening {' and '.join((config.model, *(config.rewards if job is None else ())))}"):
                job = jobs.open_for_run(config, job)
            lock = None
            if world.is_main:
                resumes = config.resume or config.checkpoint.resume_from is not None
                lock = run_folder.claim(config.out, resume=resumes, say=progress.say)
                holds.callback(lock.release)
        checkpoint.check_writable(config.checkpoint_folder, world=world)
        start: Path | str | None = config.checkpoint.resume_from  # None: from the beginning
        if config.resume and (start is None or config is not configured):
            start = checkpoint.find_newest_whole(config.checkpoint_folders, world=world, skipped=progress.say) or start
        with world.agreed():
            place = str(config.checkpoint_folder)
            hint = "it holds checkpoints of another run, such as {path}, which a new run would remove: choose another folder"
            if config.resume:
                place = (read_json(config.out / run_folder.CONFIG) or {}).get("checkpoint", {}).get("folder") or place
                hint = "it holds no checkpoint, and the run has saved {path}: copy its checkpoints there"
            if others := checkpoint.list_checkpoints(place, recover=False) if start is None else ():
                raise UsageError("checkpoint.folder", str(config.checkpoint_folder), hint=hint.format(path=others[-1]))
        try:
            with wait_for("building the run"):
                trainer = Trainer(config, job, world, console=progress.console, stop=stop, resume_from=start)
        except (MemoryError, RuntimeError) as error:
            error.add_note("while the run was built: lower it by `engine.base` int8, `engine.micro_batch`, or more ranks")
            raise
        with trainer:
            # With the micro-batch that was chosen, and as a new run, so that the record can be trained in another folder.
            new_run = with_values(trainer.config, {"resume": False, "checkpoint.resume_from": None})
            record = as_record(with_absolute_paths(new_run))
            with ExitStack() as stack:
                done, folder = trainer.engine.updates, None
                if world.is_main:
                    folder = RunFolder(config.out, record, update=done, tracker=config.tracker, say=progress.say)
                    stack.callback(folder.close)
                    stack.enter_context(folder.keep_warnings())
                progress.begin(done)
                for line in describe_run(trainer.config, trainer.engine, done=done):
                    progress.say(line)
                if config.resume and start is None:
                    progress.say(f"{config.checkpoint_folder} holds no checkpoint yet: the run starts from the beginning")
                for note in describe_spread(trainer.config, trainer.engine):
                    progress.say(note)
                for name, choice in trainer.choices.items():
                    progress.say(str(choice))
                    if folder:
                        folder.log({"update": done, name: choice.record})
                with wait_for("compiling blocks"):
                    compiled = trainer.warm_up(progress)
                if compiled is not None:
                    progress.say(str(compiled))
                if (handshake := trainer.sampler.compare_with_servers()) is not None:
                    progress.say(str(handshake))
                    if folder:
                        folder.log({"update": done, "handshake": handshake.record})
                return Training(trainer, folder, progress, lock).run()


class Training:
    """Loop of a run: batches, with evaluations, records and checkpoints between them.

    Args:
        folder: run folder, on the main rank.
        lock: lock of the run folder, on the main rank.
    """

    def __init__(
        self, trainer: Trainer, folder: RunFolder | None, progress: RunProgress, lock: FolderLock | None = None
    ) -> None:
        self.lock = lock
        self.trainer, self.config, self.folder, self.progress = trainer, trainer.config, folder, progress
        self.final_samples = self.config.evaluation.count_samples(
            len(trainer.evaluated.heldout), self.config.evaluation.final_samples
        )

    def run(self) -> dict[str, Any]:
        """Train until the last update or a request to stop, and return the summary (empty if stopped).

        Raises:
            RunError: the run cannot continue; the last complete batch is saved if all ranks can take part.
        """
        trainer = self.trainer
        try:
            return self._train()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, AbandonedRolloutError | LostProcessError):
                raise
            failure: BaseException = (
                diagnostics.explain_out_of_memory(error, trainer.phase, trainer.engine) if is_out_of_memory(error) else error
            )
            if failure is error:
                error.add_note(f"in the phase {trainer.phase}")
            stopped = self._save_finished(error)
            if stopped and isinstance(error, FluvialError):
                self.progress.say(f"{error}; on resume, the batch begun after update {trainer.engine.updates} is repeated")
                return self._report_stop()
            if failure is error:
                raise
            raise failure from error

    def _save_finished(self, error: BaseException) -> bool:
        """Save the last complete batch if every rank has raised; return whether it was saved and a stop was requested."""
        trainer, world = self.trainer, self.trainer.world
        if trainer.phase == "checkpoint" or (world.size > 1 and not getattr(error, "on_all_ranks", False)):
            return False
        try:
            self._check_lock()
            trainer.saver.wait(trainer.progress)
            saved = trainer.save_finished()
        except (MemoryError, RuntimeError) as second:
            self.progress.say(f"update {trainer.engine.updates} could not be saved either: {second}")
            return False
        if saved:
            self.progress.say(f"saved after update {trainer.engine.updates}")
        return saved and any(world.gather_items(bool(trainer.stop)))

    def _train(self) -> dict[str, Any]:
        trainer, config = self.trainer, self.config
        if any(trainer.world.gather_items(bool(trainer.stop))):
            return self._report_stop()
        self._check_job()
        probe = self._open_probe()
        if trainer.progress.before is None:
            began = time.perf_counter()
            evaluation = self._evaluate("before", self.final_samples, probe)
            expected = estimate_seconds(config, time.perf_counter() - began, samples=evaluation.samples)
            trainer.progress.before = {"score": evaluation.score, "exact": evaluation.exact}
            self.progress.say(metrics.format_evaluation("before training", evaluation))
            self.progress.say(f"about {format_seconds(expected)} of training, by the evaluation's speed and without rewards")
        self.progress.mark()
        end = ""  # why the run ends early
        for record in trainer:
            if self.folder:
                self.folder.log(record)
            if "reward" in record and config.evaluation.every:
                trainer.progress.recent.append(record["reward"]["mean"])
            self.progress.advance(metrics.select_shown(record), record["seconds"], updates=config.updates_per_rollout)
            done = trainer.engine.updates
            if self._is_due(config.evaluation.every) and done < config.updates and not trainer.stopping:
                evaluation = self._evaluate(f"update {done:04d}", config.evaluation.samples, probe)
                self.progress.say(metrics.format_evaluation(f"after {done} updates", evaluation))
                end = self._watch_reward(evaluation)
            if self._is_due(config.export.every) and done < config.updates:
                self.progress.say(f"exported: {exports.export_current(trainer.engine, config, trainer.job.model)}")
            if trainer.stopping or end or self._is_due(config.checkpoint.every) or done == config.updates:
                self._save(ends=trainer.stopping)
            if end:
                break
        if trainer.stopping:
            self._save(ends=True)  # unless the last update has a checkpoint: the run may have stopped within a rollout
        with wait_for("checkpoint in the background"):
            trainer.saver.wait(trainer.progress)  # the checkpoint that the report names must be complete
        if trainer.stopping and not end:
            return self._report_stop()
        summary = self._finish(probe, end)
        if end:
            self.progress.say(end)
        return summary

    def _report_stop(self) -> dict[str, Any]:
        """Print that the run was stopped and how to continue it, and return its empty summary."""
        done = self.trainer.engine.updates
        saved = self.trainer.saver.saved_at == done
        state = f"stopped after update {done}, all saved" if saved else "stopped before the first update"
        self.progress.say(f"{self.trainer.stop.name or 'asked'}: {state}; continue with --resume --out {self.config.out}")
        return {}

    @collective
    def _save(self, *, ends: bool = False) -> None:
        """Write a checkpoint, unless another process has taken the run folder."""
        self.trainer.phase = "checkpoint"
        self._check_lock()
        with wait_for("checkpoint"):
            self.trainer.save(ends=ends)

    def _check_lock(self) -> None:
        with self.trainer.world.agreed():
            if self.lock is not None:
                self.lock.check()

    @collective
    def _watch_reward(self, evaluation: Evaluation) -> str:
        """Return why the run stops after an evaluation; empty if the reward is not gamed."""
        trainer, count, update = self.trainer, self.config.evaluation.stop_when_gamed, self.trainer.engine.updates
        if not evaluation.score:
            return ""
        points, recent, evaluator = (
            trainer.progress.evaluations,
            trainer.progress.recent,
            diagnostics.choose_watched([*evaluation.score]),
        )
        if recent:
            points.append(EvaluationPoint(update, evaluation.score[evaluator], fmean(recent)))
            recent.clear()
        best = diagnostics.find_best(points)
        if not count or best is None:
            return ""
        if best.update == update:
            self._save()
        gaming = diagnostics.find_gaming(points, count)
        if not gaming:
            return ""
        where = f"{self.config.checkpoint_folder}/{best.update:06d}"
        why = diagnostics.describe_gaming(gaming, evaluator)
        return f"stopped after update {update}: {why}; best evaluation after update {best.update}: checkpoint {where}"

    def _check_job(self) -> None:
        """Check that the job's model can be trained, if the job has a check, and exported as configured."""
        exports.check_exports(self.config, self.trainer.job.model)
        check = self.trainer.job.check
        if check is None:
            return
        problem = convert_errors(UsageError, ValueError, says=f"model {self.config.model}")
        with self.trainer.engine.inference() as module, self.trainer.world.agreed(), problem:
            self.progress.say(check(module))

    def _is_due(self, every: int) -> bool:
        """Return whether the updates of the last rollout reached a multiple of `every`; 0 is never."""
        done = self.trainer.engine.updates
        return bool(every) and done // every > (done - self.config.updates_per_rollout) // every

    def _evaluate(self, name: str, samples: int, probe: Probe | None, *, extremes: int = 0) -> Evaluation:
        kept = KeptImages() if extremes and self.trainer.evaluated.evaluators else None
        with wait_for(f"evaluation {name}"):
            result = self.trainer.evaluate(samples, keep=kept, probe=probe)
        if self.folder:
            self.folder.log({"update": self.trainer.engine.updates, **metrics.summarize_evaluation(result)})
            self.folder.write_scores(name, result.scores)
            title = metrics.format_title(name, result)
            shown = result.images, texts(result.prompts), result.images_score
            self.folder.write_samples(name, *shown, title=title, update=self.trainer.engine.updates)
            if result.sounds is not None:
                self.folder.write_sounds(name, result.sounds)
        if kept is not None:
            self._write_extremes(kept, result, extremes)
        return result

    @collective
    def _write_extremes(self, kept: KeptImages, result: Evaluation, count: int) -> None:
        """Write the best and the worst samples of an evaluation."""
        for kind, chosen in zip(
            ("best", "worst"), kept.select_extremes(result.scores, self.trainer.world, count=count), strict=True
        ):
            if self.folder and chosen.images:
                title = f"{kind} of {result.samples} samples, by {result.scores.evaluators[-1]}"
                self.folder.write_samples(kind, *chosen, title=title, update=self.trainer.engine.updates)

    def _open_probe(self) -> Probe | None:
        """Take the probe of the model at the start of training; read it if the run is resumed.

        None if it cannot be read: later evaluations do not measure the drift.
        """
        trainer, path, saved = self.trainer, self.config.out / "probe.safetensors", None
        if trainer.progress.before is not None:
            try:
                saved = Probe.load(path, trainer.world.device)
            except RunError as error:
                self.progress.say(f"{error}; drift is no longer measured")
            return saved if all(trainer.world.gather_items(saved is not None)) else None
        with trainer.engine.inference(average=True) as module, wait_for("samples to measure the drift from"):
            probe = Probe.take(trainer.job, module, trainer.schedule, micro_batch=self.config.largest_pass)
        if trainer.world.is_main:
            probe.save(path)
        return probe

    def _finish(self, probe: Probe | None, end: str) -> dict[str, Any]:
        """Evaluate, export, write reports, and return the summary; `end` says why the run ended early, else empty."""
        trainer, config, out = self.trainer, self.config, self.config.out
        after = self._evaluate("after", self.final_samples, probe, extremes=EXTREMES)
        with wait_for("export of the weights"):
            trainer.export(out)
        counters, seconds = trainer.progress, sum(trainer.progress.seconds.values())
        assert counters.before is not None
        summary: dict[str, Any] = {
            **metrics.flatten_before_after(counters.before, after),
            "train_seconds": seconds,
            "train_seconds_by_phase": dict(counters.seconds),
            "train_samples": counters.samples,
            "samples_per_second": counters.samples / seconds if seconds else 0.0,
            "first_pass_max_abs_log_ratio": counters.max_log_ratio,
            "updates": trainer.engine.updates,
            "skipped_steps": trainer.engine.skipped,
            "ranks": trainer.world.size,
            "seed": config.seed,
            "versions": metrics.list_versions(),
            **({"stopped_when_gamed": end} if end else {}),
        }
        reports = list[Path]()
        sheets = [out / "samples" / f"{name}.png" for name in ("before", "after")]
        if self.folder:
            summary["evaluation"] = as_records(list_rows(after.scores, self.folder.find_earlier("before", after.scores)))
            run_folder.write_json(out / run_folder.SUMMARY, summary)
            images.join(out / "samples" / "before-after.png", sheets)
            exports.write_cards(trainer.engine, config, trainer.job.model)
            with wait_for("report"):
                reports = self.folder.write_reports()
        if trainer.console:
            self.progress.say("")
            if after.score:
                trainer.console.print(metrics.tabulate_before_after(counters.before, after), highlight=False)
            self.progress.say(
                f"{trainer.engine.updates} updates, {counters.samples} samples, {seconds:.0f} s of training; "
                f"largest first-pass |log ratio| {counters.max_log_ratio:g}; {trainer.engine.skipped} steps skipped"
            )
            written = "".join(f"report: {path}; " for path in reports)
            self.progress.say(f"{written}images: {out / 'samples' / 'before-after.png'}")
        return summary


def _resume_restarted(config: TrainConfig, world: World) -> TrainConfig:
    """Return the configuration with `resume` set if torchrun has restarted this run."""
    return replace(config, resume=True) if run_folder.check_restart(config.out, world) else config
