"""Comparison: every recipe with every seed, over as many rollouts or as many seconds, and the rows that come of it.

Each run has a process of its own (`points`), which times its updates alone.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fluvial.bench import harness
from fluvial.engines import Trainer
from fluvial.engines.cli import preferences
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.monitoring.diagnostics import Probe
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.run.record import as_record

OFFLINE = "dpo, offline"  # dpo on a file of preferences between the base model's samples
TEACHER = "grpo"  # the recipe whose first seed's weights teach distillation
LEFT_OUT = "handwriting", "words", "edit-words", "opd"  # grpo with other numbers, and distillation by two other runs
NAMES = (*(name for name in RECIPES if name not in LEFT_OUT), OFFLINE)
EVALUATIONS = 5  # per run, the last one included
EVALUATED = 1000  # samples of the first and the last evaluation


@dataclass(frozen=True)
class ObjectivesConfig:
    """Train with every objective, and compare them at equal samples and at equal time.

    Runs whose rows are in the table already, with the same settings, are not made again.

    Args:
        recipes: Names of recipes; distill needs the weights of grpo's first seed, run here or kept from before.
        seeds: Seeds of each recipe.
        rollouts: Number of rollouts per run: equal samples. 0 leaves this comparison out.
        budget_seconds: Seconds of training at which runs are compared, of CPU time if the job is on a CPU: equal time. It is
            read off a run of equal samples that takes longer, between two of its evaluations; its learning rate falls as
            that of the longer run does. Where that run ends earlier, another is made, whose number of updates follows from
            the time of the first ones. 0 leaves this comparison out.
        parallel: Number of runs at the same time, each with one thread.
        keep: Folder for preferences and the teacher's weights; by default they are deleted.
        out: Folder of the table and the plot.
        again: Make runs again whose rows are in the table.
        plot: Only print the table and draw the plot.
    """

    recipes: tuple[str, ...] = NAMES
    seeds: tuple[int, ...] = (0, 1, 2)
    rollouts: int = 25
    budget_seconds: float = 60.0
    parallel: int = 2
    keep: Path | None = None
    out: Path = harness.RESULTS
    again: bool = False
    plot: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.recipes if name not in NAMES]:
            raise UsageError(f"recipes: there is no {unknown[0]!r}, expected some of {', '.join(NAMES)}")
        if not self.seeds or self.parallel < 1:
            raise UsageError("seeds and parallel: expected at least one")
        if not (self.rollouts == 0 or self.rollouts >= EVALUATIONS):
            raise UsageError(f"rollouts is {self.rollouts}, expected 0 or at least {EVALUATIONS}")
        if not 0 <= self.budget_seconds < 1e6:
            raise UsageError(f"budget_seconds is {self.budget_seconds}, expected a number from 0 to 1e6")
        if not self.rollouts and not self.budget_seconds:
            raise UsageError("rollouts and budget_seconds are 0, expected one of them above 0")
        if "distill" in self.recipes and TEACHER not in self.recipes and not self.taught and not self.plot:
            raise UsageError(f"recipes: distill takes its teacher from {TEACHER}, which is not among them")

    @property
    def taught(self) -> bool:
        """Whether the teacher's weights are kept from before."""
        return self.keep is not None and (self.keep / "teacher" / "weights").is_dir()

    def cases(self, folder: Path) -> list["ObjectiveCase"]:
        """Return the runs; those that need what another one leaves in `folder` come last."""
        limits = ([float(self.rollouts)] if self.rollouts else [], [self.budget_seconds] if self.budget_seconds else [])
        all_cases = [
            ObjectiveCase(name, seed, rollouts=int(limit) if by == 0 else 0, seconds=limit if by else 0.0, folder=folder)
            for by, known in enumerate(limits)
            for limit in known
            for seed in self.seeds
            for name in self.recipes
        ]
        return sorted(all_cases, key=lambda case: case.recipe == "distill")


@dataclass(frozen=True)
class ObjectiveCase:
    """A run: a recipe and a seed, over a number of rollouts or of seconds.

    Args:
        recipe: name of a recipe, or OFFLINE.
        seed: seed of the run.
        rollouts: number of rollouts; 0 where time is the limit.
        seconds: training time; 0 where samples are.
        folder: folder of what runs share: preferences, the teacher, evaluations of base models.
    """

    recipe: str
    seed: int
    rollouts: int
    seconds: float
    folder: Path

    @property
    def limit(self) -> str:
        """The end of the run, as the table names it."""
        return f"{self.rollouts} rollouts" if self.rollouts else f"{self.seconds:g} s"

    @property
    def config(self) -> TrainConfig:
        """The run's settings; where time is the limit, with the recipe's own number of updates."""
        made = RECIPES[self.recipe.partition(",")[0]]()
        few = {"evaluation.every": 0, "evaluation.final_samples": EVALUATED}
        made = with_values(made, {"out": self.folder / "none", "seed": self.seed, **few})
        if self.rollouts:
            made = replace(made, updates=self.rollouts * made.updates_per_rollout)
        if self.recipe == "distill":
            made = with_values(made, {"method.teacher": (str(self.folder / "teacher" / "weights"),)})
        if self.recipe == OFFLINE:
            made = with_values(made, {"method.preferences": self.folder / f"preferences-{self.seed}"})
        return made

    def is_covered(self, points: Sequence["CurvePoint"]) -> bool:
        """Return whether this run of equal time can be read off the evaluations of one of equal samples, which is longer."""
        return bool(self.seconds) and any(point.seconds >= self.seconds for point in points)

    @property
    def settings(self) -> str:
        """Hash of the settings, without places of files, and without the number of updates where time is the limit."""
        record = as_record(self.config)
        for name in ("out", "seed", *(() if self.rollouts else ("updates",))):
            del record[name]
        for name in ("teacher", "preferences"):
            record["method"].pop(name, None)
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class CurvePoint:
    """An evaluation of a run."""

    recipe: str
    seed: int
    limit: str  # what ended the run: a number of rollouts or of seconds
    settings: str  # hash of the run's settings
    updates: int
    samples: int  # drawn and scored so far, or read from data
    seconds: float  # training time so far: of the CPU, or by the clock if an accelerator computes
    heldout: float  # whole codes right, by the recogniser that training never sees
    reward: float  # the same, by the recogniser that is the reward
    drift: float  # relative distance of the velocity from the base model's
    diversity: float  # mean distance within a group of the last rollout; NaN without groups
    evaluated: int  # samples per evaluation
    max_log_ratio: float  # largest first-pass |log ratio|; NaN without one
    device: str
    torch: str
    date: str


PROBED = 4  # updates from which the time of one is taken; the first is left out


def points(case: ObjectiveCase) -> list[CurvePoint]:
    """Train once, and return the evaluations, the base model's first."""
    chosen = case.folder / f"preferences-{case.seed}"
    if case.recipe == OFFLINE and not (chosen / "preferences.jsonl").is_file():
        harness.in_processes(preferences.run, ["handwriting", "--out", str(chosen), "--seed", str(case.seed)])
    config = case.config
    if case.seconds:
        config = replace(config, updates=affordable(_time_rollout(config), case.seconds) * config.updates_per_rollout)
    rollouts = config.updates // config.updates_per_rollout
    samples, seconds, diversity, ratio = 0, 0.0, float("nan"), float("nan")

    evaluations = list[CurvePoint]()

    def note(updates: int, values: dict[str, Any], evaluated: int) -> None:
        known: dict[str, Any] = {
            "updates": updates,
            "samples": samples,
            "seconds": round(seconds, 2),
            "diversity": diversity,
        }
        known |= {"evaluated": evaluated, "max_log_ratio": ratio, **values, **harness.facts(CurvePoint)}
        evaluations.append(CurvePoint(case.recipe, case.seed, case.limit, case.settings, **known))

    with Trainer(config) as trainer:
        note(0, _base(trainer, case), config.evaluation.final_samples)
        with trainer.engine.inference(average=True) as module:
            probe = Probe.take(trainer.job, module, trainer.schedule, micro_batch=config.samples_per_pass)
        for done in range(1, rollouts + 1):
            start = _clock(trainer)
            record = trainer.update()
            seconds += _clock(trainer) - start
            samples, diversity = record["samples"], record.get("diversity", diversity)
            if (first := record.get("first_pass_max_abs_log_ratio")) is not None:
                ratio = max(first, 0.0 if ratio != ratio else ratio)
            if done == rollouts or (done % -(-rollouts // EVALUATIONS) == 0):
                evaluated = config.evaluation.final_samples if done == rollouts else config.evaluation.samples
                note(record["update"], _evaluate(trainer, evaluated, probe), evaluated)
        if case.recipe == TEACHER and case.rollouts:
            trainer.export(case.folder / f"teacher-{case.seed}")
    return evaluations


def affordable(seconds: float, budget: float) -> int:
    """Return how many rollouts with their updates fit into a budget, at least one."""
    return max(1, int(budget / seconds))


def _time_rollout(config: TrainConfig) -> float:
    """Return the seconds of a rollout with its updates, as the median of the first ones."""
    with Trainer(config) as trainer:
        spent = []
        for _ in range(PROBED):
            start = _clock(trainer)
            trainer.update()
            spent.append(_clock(trainer) - start)
    return median(spent[1:])


def _clock(trainer: Trainer) -> float:
    """Return the process's CPU time, which a busy machine changes little; by the clock if an accelerator computes."""
    return time.process_time() if trainer.world.device.type == "cpu" else time.perf_counter()


def _evaluate(trainer: Trainer, samples: int, probe: Probe | None = None) -> dict[str, Any]:
    evaluated = trainer.evaluate(samples, probe=probe)
    exact = {name: evaluated.exact[name] for name in ("heldout", "reward")}
    return {**exact, "drift": 0.0 if evaluated.velocity_drift is None else evaluated.velocity_drift}


def _base(trainer: Trainer, case: ObjectiveCase) -> dict[str, Any]:
    """Return the evaluation of the base model, which runs of the same model with the same evaluation share."""
    config = trainer.config
    name = f"{config.model}-{config.evaluation_steps}-{config.evaluation.solver}-{config.evaluation_guidance.scale:g}"
    path = case.folder / f"base-{name}-{config.evaluation.final_samples}.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    evaluated = _evaluate(trainer, config.evaluation.final_samples)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(evaluated), encoding="utf-8")
    whole.replace(path)
    return evaluated
