"""Times of the phases of the built-in job's `Trainer.update`: rollout, reward and update, in samples per second."""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluvial.bench import harness
from fluvial.bench.harness import Measurement
from fluvial.core.checks import BATCH, check_choice, check_fields
from fluvial.engines.engine.world import init_world
from fluvial.engines.run import job as jobs
from fluvial.engines.run import recipes
from fluvial.engines.run.config import with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import Truncate
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache

GUIDED = {"sampling.guidance": Guidance(2.0)}
BFLOAT16 = {"engine.compute": "bfloat16", "correction": Truncate(), "rollout.max_log_ratio": 1e3}
COMPILED = {"engine.compile": True, "engine.micro_batch": 16, "engine.update_micro_batch": "rollout"}
# Settings beside the recipe's with LoRA: levers, each after the case without it.
CASES: dict[str, dict[str, Any]] = {
    "full": {"train": "full"},
    "lora": {},
    "nothing reused": {"rollout.reuse": "none"},
    "merged": {"rollout.reuse": "merged", "engine.compute": "float32"},
    "bfloat16": BFLOAT16,
    "bfloat16 merged": {**BFLOAT16, "rollout.reuse": "merged"},
    "float16": {**BFLOAT16, "engine.compute": "float16"},
    "blocks on the host": {"engine.offload": "blocks"},
    "guided": GUIDED,
    "guided, first-block cache": {**GUIDED, "rollout.step_cache": FirstBlockCache(0.1)},
    "guided, cache of guidance": {**GUIDED, "rollout.step_cache": GuidanceCache(2)},
    "compiled": COMPILED,
    "compiled, larger passes": {**COMPILED, "engine.update_micro_batch": 64},
    "compiled, guided": {**COMPILED, **GUIDED},
    "compiled, guided, first-block cache": {**COMPILED, **GUIDED, "rollout.step_cache": FirstBlockCache(0.1)},
    "compiled, guided, cache of guidance": {**COMPILED, **GUIDED, "rollout.step_cache": GuidanceCache(2)},
}


@dataclass(frozen=True)
class PhasesConfig:
    """Time the phases of a batch of the built-in job with different settings in turn.

    Args:
        cases: names of `CASES`.
        prompts: prompts per rollout, with eight samples each; all samples are one micro-batch.
        runs: number of batches per case.
        out: folder of phases.csv; rows are appended.
    """

    cases: tuple[str, ...] = ("full", "lora")
    prompts: int = 16
    runs: int = 10
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        check_fields(self, "phases", prompts=BATCH, runs=BATCH)
        for name in self.cases:
            check_choice("phases", "cases", name, CASES)


def run(config: PhasesConfig) -> list[Measurement]:
    """Measure each phase of the cases, and the CPU seconds of a batch, append to phases.csv and print a table."""
    with tempfile.TemporaryDirectory() as folder, init_world() as world:
        job = jobs.handwriting()
        defaults = replace(recipes.grpo(), out=Path(folder), train="lora")
        size = {"sampling.prompts": config.prompts, "engine.micro_batch": defaults.method.sampling.group * config.prompts}
        runs = {name: with_values(defaults, {**size, **CASES[name]}) for name in config.cases}
        trainers = {name: Trainer(run, job, world) for name, run in runs.items()}
        seconds: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}

        def update(name: str) -> None:
            start = time.process_time()
            phases = trainers[name].update()["seconds"]
            for phase, spent in {**phases, "all": sum(phases.values()), "cpu": time.process_time() - start}.items():
                seconds[name].setdefault(phase, []).append(spent)

        harness.alternate(config.runs, {name: lambda name=name: update(name) for name in trainers})  # type: ignore[misc]
        for trainer in trainers.values():
            trainer.close()
        batch = defaults.method.sampling.group * config.prompts
        mode, shape = f"{world.size} rank(s)", f"{batch}x1x8x32"
        rows = [  # without the first run, the warm-up
            harness.make_row(phase, times[1:], provider=name, mode=mode, shape=shape, amount=batch, unit="samples")
            for name, phases in seconds.items()
            for phase, times in phases.items()
        ]
    harness.append(config.out / "phases.csv", rows)
    harness.show("phases of an update of the handwriting job", rows, baseline=config.cases[0])
    return rows
