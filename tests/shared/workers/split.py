"""Updates a training run whose samples are split over pairs of ranks, for test_context.py."""

import warnings
from pathlib import Path
from typing import Any

from helpers import tiny_token_job, tiny_transformers
from helpers.handwriting_jobs import config

from fluvial.engines.engine.world import World
from fluvial.engines.run.config import with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.generate import Guidance


def updates(world: World, folder: str) -> dict[str, Any]:
    """Return {train: {rewards, norms, ratios, pairs, gradients}} of two updates, with a KL and guidance."""
    warnings.simplefilter("ignore")  # deprecations within diffusers
    result: dict[str, Any] = {}
    for train in ("lora", "full"):
        run = config(
            Path(folder),
            train=train,
            **{
                "engine.micro_batch": 2,
                "engine.context_parallel": min(2, world.size),
                "engine.comm": "reshard",
                "kl.coef": 0.1,
            },
        )
        run = with_values(run, {"sampling.guidance": Guidance(2.0)})
        trainer, records, gradients = Trainer(run, tiny_token_job.job(), world, console=None), [], []
        for _ in range(2):
            records.append(trainer.update())
            gradients.append({name: g.tolist() for name, g in tiny_transformers.gradients(trainer.engine).items()})
        trainer.close()
        result[train] = {
            "rewards": [record["reward"] for record in records],
            "norms": [record["grad_norm"] for record in records],
            "ratios": [record["first_pass_max_abs_log_ratio"] for record in records],
            "pairs": [record["pairs"] for record in records],
            "gradient": gradients[0],
        }
    return result
