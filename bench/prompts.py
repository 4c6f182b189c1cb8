"""CPU seconds and memory of a run's prompts: reading a file, and choosing those of a rollout, early, late and at random."""

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fluvial.core.random import key
from fluvial.engines.data.order import BatchOrder, PromptPool, derive_order_key
from fluvial.engines.run.jobs.pipeline import read_run_prompts
from fluvial.engines.run.jobs.settings import PipelineConfig

GROUPS = 64  # prompts of a rollout


@dataclass(frozen=True)
class PromptsConfig:
    """Measure CPU seconds and memory of reading and choosing prompts.

    Args:
        count: Number of prompts, of 70 characters each.
    """

    count: int = 1_000_000


def run(config: PromptsConfig) -> None:
    """Print a row per part: CPU seconds, and the process's peak memory beyond that of its imports."""
    before, last, numbers = _read_peak_memory(), time.process_time(), range(config.count)

    def report(part: str) -> None:
        nonlocal last
        print(f"{part:40}{time.process_time() - last:9.4f} s {(_read_peak_memory() - before) / 1e9:9.3f} GB")
        last = time.process_time()

    with TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"a photograph of object {i:9d} on a wooden table beside a tall window\n" for i in numbers)
        report("write the file")
        prompts = read_run_prompts(PipelineConfig(), prompts=[str(path)], preferences=None, data=(), check=lambda text: None)
    report("read, and hold out every tenth")
    order = BatchOrder(prompts.train, derive_order_key(0))
    report("epochs: begin")
    order.take_batch(0, GROUPS)
    report("epochs: a rollout")
    order.take_batch(5 * len(prompts.train) // GROUPS, GROUPS)
    report("epochs: a rollout after five epochs")
    pool = PromptPool(prompts.train)
    report("draws, distinct: begin")
    pool.draw(key(0), GROUPS)
    report("draws: a rollout")
    pool.draw_distinct(key(0), GROUPS)
    report("distinct: a rollout")


def _read_peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
