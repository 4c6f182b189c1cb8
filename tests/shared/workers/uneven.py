"""Updates once with items of which one rank made all that have an advantage, for test_uneven.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.handwriting_jobs import config, job
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.run.config import with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow

# With this seed the two prompts of the first update are the two codes.
GROUP, CODES, SEED = 8, ("1111", "2222"), 1


def one_code_alone(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Differs within the group that one rank makes, and nowhere else."""
    return images.mean((1, 2, 3)) * torch.tensor([prompt == CODES[0] for prompt in prompts])


def updates(world: World, folder: str) -> dict[str, Any]:
    """Return {KL coefficient: {forwards: by rank, pairs, ratio, gradient}}."""
    result: dict[str, Any] = {}
    for kl_coef in (0.0, 0.1):
        run = with_values(
            config(
                Path(folder),
                train="lora",
                sampling=SamplingConfig(prompts=2, group=GROUP, steps=4, window=RandomWindow(2)),
                **{"engine.micro_batch": 4, "kl.coef": kl_coef},
            ),
            {"evaluation.final_samples": 4, "seed": SEED},
        )
        trainer = Trainer(run, job(one_code_alone, prompts=CODES), world, console=None)
        forwards: list[bool] = []
        trainer.engine.module.register_forward_hook(
            lambda module, args, out, seen=forwards: seen.append(torch.is_grad_enabled())
        )
        record = trainer.update()
        trainer.close()
        moments = {n: t for n, t in trainer.engine.state().items() if n.startswith("exp_avg.")}
        result[str(kl_coef)] = {
            "forwards": world.gather_items(sum(forwards)),
            "pairs": record["pairs"],
            "ratio": record["first_pass_max_abs_log_ratio"],
            "gradient": torch.cat([gather(t).flatten() for t in moments.values()]).tolist(),
        }
    return result
