"""One run, in a process of its own: drives a trainer, times its updates alone, and evaluates it a few times."""

import json
import os
import time
from dataclasses import replace
from statistics import median
from typing import Any

from fluvial.bench import harness
from fluvial.bench.objectives.cases import EVALUATIONS, OFFLINE, TEACHER, Case, Point
from fluvial.engines import Trainer
from fluvial.engines.cli import preferences
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.monitoring.diagnostics import Probe

PROBED = 4  # updates from which the time of one is taken; the first is left out


def points(case: Case) -> list[Point]:
    """Train once, and return the evaluations, the base model's first."""
    chosen = case.folder / f"preferences-{case.seed}"
    if case.recipe == OFFLINE and not (chosen / "preferences.jsonl").is_file():
        harness.in_processes(preferences.run, ["handwriting", "--out", str(chosen), "--seed", str(case.seed)])
    config = case.config
    if case.seconds:
        config = replace(config, updates=affordable(_time_rollout(config), case.seconds) * config.updates_per_rollout)
    rollouts = config.updates // config.updates_per_rollout
    samples, seconds, diversity, ratio = 0, 0.0, float("nan"), float("nan")

    evaluations = list[Point]()

    def note(updates: int, found: dict[str, Any], evaluated: int) -> None:
        known: dict[str, Any] = {
            "updates": updates,
            "samples": samples,
            "seconds": round(seconds, 2),
            "diversity": diversity,
        }
        known |= {"evaluated": evaluated, "max_log_ratio": ratio, **found, **harness.facts(Point)}
        evaluations.append(Point(case.recipe, case.seed, case.limit, case.settings, **known))

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
    found = trainer.evaluate(samples, probe=probe)
    exact = {name: found.exact[name] for name in ("heldout", "reward")}
    return {**exact, "drift": 0.0 if found.velocity_drift is None else found.velocity_drift}


def _base(trainer: Trainer, case: Case) -> dict[str, Any]:
    """Return the evaluation of the base model, which runs of the same model with the same evaluation share."""
    config = trainer.config
    name = f"{config.model}-{config.evaluation_steps}-{config.evaluation.solver}-{config.evaluation_guidance.scale:g}"
    path = case.folder / f"base-{name}-{config.evaluation.final_samples}.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    found = _evaluate(trainer, config.evaluation.final_samples)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.replace(path)
    return found
