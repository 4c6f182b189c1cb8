"""The loop of a run: collect a batch, score it, learn from it, and record the result."""

import copy
import inspect
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fluvial.core.random import Key, fold_in, key
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.engine.parallelize import count_programs
from fluvial.engines.engine.world import collective
from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.methods.table import METHODS
from fluvial.engines.run import metrics
from fluvial.engines.run.prefetch import RolloutPrefetcher
from fluvial.engines.run.run import Run
from fluvial.engines.run.saving import Progress
from fluvial.engines.sampling.batch import Batch
from fluvial.engines.sampling.generate import measure_diversity
from fluvial.engines.scoring.gather import AbandonedRolloutError
from fluvial.engines.waits import wait_for


class Loop:
    """Loop over the batches of a run, on all ranks.

    `update` runs one whole batch; `Run.update` makes one optimizer update of one network. A batch has
    `config.updates_per_rollout` optimizer updates of the policy, which `engine.updates` counts.

    Args:
        run: interface of the run for its method, with settings, networks and rewards.
        ahead: collects batches ahead of the updates; None collects each batch when it is needed.
        progress: counters of the run so far.
    """

    def __init__(self, run: Run, ahead: RolloutPrefetcher | None, progress: Progress) -> None:
        self.config, self.method, self.run, self.ahead = run.config, run.config.method, run, ahead
        self.engine, self.phase = run.engine, "evaluation"  # current phase, for error messages
        device = run.world.device
        self.peak_flops = metrics.find_peak(device, self.config.engine.compute_dtype(device))
        self.restore(progress)

    def restore(self, progress: Progress) -> None:
        """Continue from the counters of a run whose weights the engine already has."""
        self.progress = self.run.memory = progress  # the method's state is saved with the counters
        self.finished = self.run.networks.updates, progress  # state after the last complete batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Run batches until the last optimizer update or a request to stop, and yield the record of each."""
        while self.engine.updates < self.config.updates and not self.stopping:
            try:
                record = self.update()
            except AbandonedRolloutError:
                self.run.stopping = True
                return
            yield record

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.run.stopping

    @collective
    def update(self) -> dict[str, Any]:
        """Run one batch: collect and score it, make its optimizer updates, and return the record.

        Raises:
            RunError: a reward failed, or rollout and update do not compute the same policy.
            AbandonedRolloutError: a stop was requested while votes of people were pending.
        """
        self.run.sampler.compare_with_servers()
        programs = count_programs() if self.engine.compiles else 0
        root = fold_in(key(self.config.seed), self.engine.updates)
        seconds: dict[str, float] = {}
        # Copied, because this batch changes them in place; if it fails, `finished` is saved.
        copied = copy.deepcopy({name: getattr(self.progress, name) for name in ("rewards", "multipliers", "state")})
        self.finished = self.run.networks.updates, replace(self.progress, **copied)
        self.run.notes = {}
        with self.enter_phase(seconds, "rollout"), self._name_errors("collect"):
            batch = self.method.collect(self.run, root) if self.ahead is None else self.ahead.next()
        with self.enter_phase(seconds, "reward"):
            batch = self.run.score(batch)
            if batch.thumbnails is not None and batch.spec.group > 1:
                of_all = self.run.world.gather_data(batch.thumbnails)[: batch.share.batch]
                self.run.notes["diversity"] = measure_diversity(of_all, batch.spec.group)
            if self.ahead is not None:
                self.run.notes["staleness"] = {str(self.engine.updates - batch.version): batch.share.batch}
        with self.enter_phase(seconds, "update"):
            updates = self.learn(batch, root)
        self.progress.samples += batch.samples
        for phase, spent in seconds.items():
            self.progress.seconds[phase] += spent
        self._watch_ratio(updates[0])
        self.finished = self.run.networks.updates, self.progress
        compiled = count_programs() - programs if self.engine.compiles else None
        samples, peak = self.progress.samples, self.peak_flops
        return metrics.summarize_update(self.run, batch, updates, seconds, samples=samples, compiled=compiled, peak=peak)

    @collective
    def learn(self, batch: Batch, root: Key) -> list[UpdateInfo]:
        """Make the optimizer updates on a scored batch, then update the followers (moving averages, old policies).

        Args:
            root: key of the batch.
        """
        rollouts = self.engine.updates // self.config.updates_per_rollout  # before this batch: `learn` counts its updates
        with self.engine.gathered_once(), self._name_errors("learn"):
            # Copied, so that a method cannot change the recorded rewards.
            updates = list(self.method.learn(self.run, replace(batch, rewards=copy.deepcopy(batch.rewards)), root))
        if len(updates) != self.config.updates_per_rollout:  # keys, prompts and learning rate are counted by them
            raise UsageError(
                f"method {self.method.method_name} yielded {len(updates)} updates of a batch, expected epochs x minibatches "
                f"= {self.config.updates_per_rollout}: yield each `run.update` of `run.minibatches`"
            )
        self.run.networks.follow(rollouts + 1)
        return updates

    @contextmanager
    def enter_phase(self, seconds: dict[str, float], phase: str) -> Iterator[None]:
        """Enter a phase of the batch (rollout, reward or update), and add the block's seconds to it."""
        self.phase = phase
        each = self.config.updates_per_rollout
        last = (self.engine.updates // each + 1) * each
        with wait_for(f"update {last}/{self.config.updates}, {phase}"):
            start = time.perf_counter()
            yield
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

    @contextmanager
    def _name_errors(self, call: str) -> Iterator[None]:
        """Turn an exception raised in a custom method's file into a RunError of one line."""
        try:
            yield
        except FluvialError:
            raise
        except Exception as error:
            frames, kind = traceback.extract_tb(error.__traceback__), type(self.method)
            file = kind not in METHODS.values() and inspect.getfile(kind)
            if not file or not frames or frames[-1].filename != file:
                raise
            message = " ".join(str(error).split())
            where = frames[-1].name if frames[-1].name in ("learn", "collect", "loss") else call
            raise RunError(
                f"method {self.method.method_name} raised {type(error).__name__} in {where}: {message}"
            ) from error

    def _watch_ratio(self, info: UpdateInfo) -> None:
        """Record the largest |log ratio| of a batch's first optimizer update; raise RunError above its bound.

        It is 0 if rollout and update compute the same policy. With a correction the old log-probs are recomputed by the
        update, so the gap to the servers' log-probs is recorded as well.
        """
        progress, correction = self.progress, self.run.notes.get("correction")
        if "log_ratio" not in info.max_abs:
            return
        if self.config.rollout.is_served and correction is not None:
            progress.max_log_ratio = max(progress.max_log_ratio, float(correction.gap_max))
        largest, bound, known = info.max_abs["log_ratio"], self.config.rollout.max_log_ratio, self.progress.max_log_ratio
        self.progress.max_log_ratio = max(known, largest) if not math.isnan(largest) else largest
        if not largest <= bound and not info.skipped:  # NaN too
            first = self.engine.updates - self.config.updates_per_rollout + 1
            raise RunError(
                f"update {first}: the first pass has a |log ratio| of {largest:.2g}, above "
                f"`rollout.max_log_ratio` {bound:g}: rollout and update do not compute the same policy; "
                "if this is intended, set `correction` to truncate"
                + (
                    "; for update passes with as many rows as a rollout's, set `engine.update_micro_batch` to rollout"
                    if self.engine.compiles
                    else ""
                )
            )
