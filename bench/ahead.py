"""Comparison of the simulation of `fluvial plan` with a small run whose rollouts and updates have fixed durations.

    python -m fluvial.bench.ahead

The durations are sleeps, in the rollout thread and in the update, so that other programs on the machine change little.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from fluvial.bench import harness
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.extensions.plan.simulate import simulate
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.jobs.settings import MachineConfig
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import RolloutConfig, SamplingConfig, Truncate
from fluvial.engines.sampling.generate import Chunk
from fluvial.engines.sampling.window import RandomWindow

ROLLOUTS = 8
CASES = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))  # seconds of a rollout, and of its update


def score_brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Score images by their brightness."""
    return images.mean((1, 2, 3)).cpu()


def compare(rollout: float, update: float, ahead: int, world: World, folder: Path) -> dict[str, str]:
    """Time a run, and return its row beside the simulation from the seconds of each rollout and update.

    Args:
        rollout, update: seconds of sleep in each.
        ahead: number of rollouts ahead.
        world: process group of one process.
        folder: folder of the run; nothing is written to it.
    """
    config = TrainConfig(
        out=folder,
        updates=ROLLOUTS,
        engine=MachineConfig(micro_batch=4, update_micro_batch="rollout"),
        rollout=RolloutConfig(ahead=ahead),
        method=Grpo(sampling=SamplingConfig(prompts=2, group=4, steps=4, window=RandomWindow(2)), correction=Truncate()),
    )
    rollout_seconds, update_seconds = list[float](), list[float]()
    with Trainer(config, replace(jobs.handwriting(), rewards={"brightness": score_brightness}), world) as trainer:
        source: Any = trainer.sampler.source
        generate, learn = source.generate, trainer.learn

        def generate_slowly(*args: Any, **options: Any) -> Generator[Chunk, None, None]:
            start = time.perf_counter()
            time.sleep(rollout)
            yield from generate(*args, **options)
            rollout_seconds.append(time.perf_counter() - start)

        def delay_update(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            time.sleep(update)
            updates = learn(*args, **options)
            update_seconds.append(time.perf_counter() - start)
            return updates

        source.generate, trainer.learn = generate_slowly, delay_update  # type: ignore[method-assign]
        start = time.perf_counter()
        records = list(trainer)
        measured = time.perf_counter() - start
    seconds = [sum(record["seconds"].values()) for record in records]
    idle = sum(
        record["speed"]["trainer_idle"] * batch_seconds for record, batch_seconds in zip(records, seconds, strict=True)
    ) / sum(seconds)
    simulated = simulate(rollout_seconds, update_seconds, ahead=ahead).seconds
    return {
        "rollout": f"{rollout:g} s",
        "update": f"{update:g} s",
        "K": str(ahead),
        "measured": f"{measured:.1f} s",
        "simulated": f"{simulated:.1f} s",
        "difference": f"{simulated / measured - 1:+.1%}",
        "trainer idle": f"{idle:.0%}",
    }


def main() -> None:
    """Print a Markdown table with a row per case and number of rollouts ahead."""
    with init_world() as world, TemporaryDirectory() as folder:
        print(harness.format_markdown([compare(*case, ahead, world, Path(folder)) for case in CASES for ahead in (0, 1)]))


if __name__ == "__main__":
    main()
