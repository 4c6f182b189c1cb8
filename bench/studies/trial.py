"""A trial: one training run, looked at a few times by evaluators that it does not learn from."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fluvial.bench import harness
from fluvial.engines import Trainer
from fluvial.engines.errors import RunError
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.monitoring.diagnostics import Probe
from fluvial.engines.run.record import as_record


@dataclass(frozen=True)
class StudyRun:
    """A run of a study.

    Args:
        method: name of the method in the table.
        variant: name in the table of what else is done, such as a guard against hacking.
        config: settings of the run; its first reward is the proxy, and its evaluators give the other scores.
        looks: number of evaluations after the first one; 0 trains nothing.
        keep: folder for its adapter, which a later trial may begin from.
        waits: whether it begins from an adapter that another trial keeps.
    """

    method: str
    variant: str
    config: TrainConfig
    looks: int = 1
    keep: Path | None = None
    waits: bool = False

    @property
    def settings(self) -> str:
        """Hash of the settings without paths of files."""
        record = as_record(self.config)
        record.pop("out")
        record["lora"].pop("weights")
        for name in ("teacher", "preferences"):
            record["method"].pop(name, None)
        return hashlib.sha256(json.dumps([record, self.looks], sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class StudyScore:
    """The scores of one evaluation in a trial."""

    method: str
    variant: str
    model: str
    steps: int
    seed: int
    settings: str  # hash of the trial's settings
    updates: int
    samples: int  # drawn so far, or read from data
    seconds: float  # training time so far, of the CPU
    proxy: float  # mean score by the reward that is trained on
    true: float  # mean score by the held-out evaluator
    exact: float  # share of samples that it gets right
    sharpness: float
    drift: float  # relative distance of the velocity from that at the start
    diversity: float  # mean distance within a group of the last rollout; NaN without groups
    device: str
    torch: str
    date: str


def run_trials(trials: Sequence[StudyRun], path: Path, *, parallel: int) -> list[StudyScore]:
    """Run the trials that the table lacks with these settings, write their rows, and return all rows of the table.

    Trials that begin from another one's adapter wait for it.

    Raises:
        RunError: a trial failed; the others have run nevertheless.
    """
    known = {
        (row.method, row.variant, row.model, row.steps, row.seed, row.settings) for row in harness.read(path, StudyScore)
    }
    missing = [trial for trial in trials if _make_key(trial) not in known or (trial.keep and not trial.keep.is_dir())]
    failed = []
    for waiting in (False, True):
        wave = [trial for trial in missing if trial.waits == waiting]
        for trial, scores in _run_all(wave, parallel):
            if isinstance(scores, str):
                failed.append(f"{trial.method}, {trial.variant}, seed {trial.config.seed}: {scores}")
                continue
            rest = [row for row in harness.read(path, StudyScore) if _make_name(row) != _make_key(trial)[:-1]]
            harness.write(path, [*rest, *scores], StudyScore)
            first, last = scores[0], scores[-1]
            print(
                f"{trial.method}, {trial.variant}, {last.steps} steps, seed {last.seed}: right {first.exact:.3f} -> "
                f"{last.exact:.3f}, proxy {first.proxy:.3f} -> {last.proxy:.3f}, sharpness {first.sharpness:.3f} -> "
                f"{last.sharpness:.3f}, {last.seconds:.0f} s",
                flush=True,
            )
    if failed:
        raise RunError("; ".join(failed))
    return harness.read(path, StudyScore)


def run_trial(trial: StudyRun) -> list[StudyScore]:
    """Train once, and return the evaluations, the one before training first."""
    config, scores = trial.config, list[StudyScore]()
    rollouts = config.updates // config.updates_per_rollout if trial.looks else 0
    samples, seconds, diversity = 0, 0.0, float("nan")
    name = config.rewards[0].partition("=")[0] if config.rewards else "reward"

    with Trainer(config) as trainer:

        def evaluate(updates: int, probe: Probe | None = None) -> None:
            result = trainer.evaluate(config.evaluation.samples, probe=probe)
            parts = {"true": result.score["heldout"], "exact": result.exact["heldout"], "proxy": result.score[name]}
            parts |= {"sharpness": result.score["sharpness"], "drift": result.velocity_drift or 0.0, "diversity": diversity}
            known: dict[str, Any] = {"method": trial.method, "variant": trial.variant, "model": config.model}
            known |= {"steps": config.method.sampling.steps, "seed": config.seed, "settings": trial.settings}
            known |= {"updates": updates, "samples": samples, "seconds": round(seconds, 2)}
            known |= {key: round(value, 5) for key, value in parts.items()}
            scores.append(StudyScore(**known, **harness.collect_facts(StudyScore)))

        evaluate(0)
        with trainer.engine.inference(average=True) as module:
            probe = Probe.take(trainer.job, module, trainer.schedule, micro_batch=config.samples_per_pass)
        for done in range(1, rollouts + 1):
            start = time.process_time()
            record = trainer.update()
            seconds += time.process_time() - start
            samples, diversity = record["samples"], record.get("diversity", diversity)
            if done * trial.looks // rollouts > (done - 1) * trial.looks // rollouts:
                evaluate(record["update"], probe)
        if trial.keep is not None:
            trainer.export(trial.keep)
    return scores


def group_curves(rows: Sequence[StudyScore]) -> dict[tuple[str, str], list[list[StudyScore]]]:
    """Return the evaluations of each run in order, by method and variant."""
    grouped: dict[tuple[str, str], dict[int, list[StudyScore]]] = {}
    for row in sorted(rows, key=lambda row: row.updates):
        grouped.setdefault((row.method, row.variant), {}).setdefault(row.seed, []).append(row)
    return {name: list(seeds.values()) for name, seeds in grouped.items()}


def read_at(curve: Sequence[StudyScore], of: str, along: str, gain: float) -> float | None:
    """Return the field `of` where the field `along` has first risen by `gain`, interpolated linearly; None if never."""
    until = getattr(curve[0], along) + gain
    for before, after in pairwise(curve):
        if getattr(after, along) >= until:
            share = (until - getattr(before, along)) / (getattr(after, along) - getattr(before, along))
            start, end = getattr(before, of), getattr(after, of)
            return float(end if start != start else start + share * (end - start))
    return None


def _run_all(trials: Sequence[StudyRun], parallel: int) -> Iterator[tuple[StudyRun, list[StudyScore] | str]]:
    """Yield each trial as it ends, with its rows or its error message."""
    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(_run_in_process, trial): trial for trial in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run_in_process(trial: StudyRun) -> list[StudyScore] | str:
    """Return the rows of a trial that runs in a process with one thread, or its error message."""
    try:
        return harness.run_in_processes(run_trial, trial, threads=1)
    except RunError as error:
        return str(error)


def _make_key(trial: StudyRun) -> tuple[str, str, str, int, int, str]:
    config = trial.config
    return trial.method, trial.variant, config.model, config.method.sampling.steps, config.seed, trial.settings


def _make_name(row: StudyScore) -> tuple[str, str, str, int, int]:
    return row.method, row.variant, row.model, row.steps, row.seed
