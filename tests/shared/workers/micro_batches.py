"""Two ranks that choose a micro-batch, for test_micro_batch.py."""

import hashlib
from pathlib import Path
from typing import Any

from helpers import tiny_jobs as tiny

from fluvial.engines.engine.world import World
from fluvial.engines.run.config import with_values
from fluvial.engines.run.passes import micro_batch
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic


def chosen(world: World, folder: str) -> tuple[Any, dict[str, str]]:
    """Return the number that was chosen, and the digest of the weights after two updates, of it and of 4 by hand.

    Rank 0 finds every size faster than the last; rank 1 finds 4 the fastest.
    """
    seconds = {0: {1: 1.0, 2: 0.8, 4: 0.5, 8: 0.1}, 1: {1: 1.0, 2: 0.9, 4: 0.7, 8: 2.0}}[world.rank]
    real = micro_batch._time_passes

    def timed(engine: Any, passes: Any, size: int, *, decode: bool = False) -> float:
        real(engine, passes, size, decode=decode)
        return size * seconds[size]

    micro_batch._time_passes = timed
    rollout = SamplingConfig(prompts=4, group=4, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
    config = tiny.config(Path(folder), updates=2, sampling=rollout, **{"engine.micro_batch": "auto"})
    found, digests = None, {}
    for size in ("auto", "4"):
        with Trainer(
            config if size == "auto" else with_values(config, {"engine.micro_batch": 4}), tiny.job(), world
        ) as trainer:
            list(trainer)
            found = trainer.config.engine.micro_batch if found is None else found
            weights = b"".join(tensor.numpy().tobytes() for _, tensor in trainer.engine.weights())
            digests[size] = hashlib.sha256(weights).hexdigest()
    return found, digests
