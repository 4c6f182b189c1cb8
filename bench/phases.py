"""Times the phases of the built-in job's update: rollout, reward and optimizer update, in samples per second."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from fluvial.bench import harness
from fluvial.bench.harness import Measurement
from fluvial.engines.engine.world import init_world
from fluvial.engines.run import job as jobs
from fluvial.engines.run import recipes
from fluvial.engines.run.trainer import Trainer


@dataclass(frozen=True)
class PhasesConfig:
    """Time the phases of the built-in job's update, full fine-tuning and LoRA in turn.

    Args:
        runs: updates of each.
        out: folder of phases.csv; rows are appended.
    """

    runs: int = 10
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs is {self.runs}, expected at least 1")


def run(config: PhasesConfig) -> list[Measurement]:
    """Measure each phase of full fine-tuning and of LoRA, append to phases.csv and print a table."""
    with tempfile.TemporaryDirectory() as folder, init_world() as world:
        job = jobs.handwriting()
        defaults = replace(recipes.grpo(), out=Path(folder))
        runs = {"full": replace(defaults, train="full"), "lora": replace(defaults, train="lora")}
        trainers = {name: Trainer(run, job, world) for name, run in runs.items()}
        seconds: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}

        def update(name: str) -> None:
            phases = trainers[name].update()["seconds"]
            for phase, spent in {**phases, "all": sum(phases.values())}.items():
                seconds[name].setdefault(phase, []).append(spent)

        harness.alternate(config.runs, {name: lambda name=name: update(name) for name in trainers})  # type: ignore[misc]
        for trainer in trainers.values():
            trainer.close()
        batch = defaults.method.sampling.batch
        rows = [
            harness.row(
                phase,
                times[1:],  # the first is the warm-up
                provider=name,
                mode=f"{world.size} rank(s)",
                shape=f"{batch}x1x8x32",
                amount=batch,
                unit="samples",
            )
            for name, phases in seconds.items()
            for phase, times in phases.items()
        ]
    harness.append(config.out / "phases.csv", rows)
    harness.show("phases of an update of the handwriting job", rows, baseline="full")
    return rows
