"""Runs on several ranks: the calls that all must make, items that lie unevenly, and rewards that fail on one."""

import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.handwriting_jobs import alternating, config, job
from torch import Tensor

from fluvial.engines.cli import main as cli
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.engines.run import train
from fluvial.engines.run.config import with_values
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.window import RandomWindow
from fluvial.engines.scoring import runner


def calls(world: World, folder: str) -> list[list[str]]:
    """Return the calls of functions that every rank must call, by rank, of an update and an evaluation."""
    known = {}
    for name, module in [*sys.modules.items()]:
        if name.startswith("fluvial."):
            owners = [module, *(each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == name)]
            marked = [
                each for owner in owners for each in vars(owner).values() if getattr(each, "is_collective", False) is True
            ]
            known.update({inspect.unwrap(each).__code__: each.__qualname__ for each in marked})
    found = list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in known:
            found.append(known[frame.f_code])

    with Trainer(config(Path(folder)), job(alternating), world, console=None) as trainer:
        sys.setprofile(note)
        trainer.update()
        trainer.evaluate()
        sys.setprofile(None)
    return world.gather_items(found)


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


def fail(error: BaseException) -> Tensor:
    raise error


def hang() -> Tensor:
    time.sleep(600)
    raise AssertionError


BAD: dict[str, Callable[[int], Tensor]] = {
    "nan": lambda count: torch.full((count,), float("nan")),
    "shape": lambda count: torch.ones(1),
    "raises": lambda count: fail(KeyError("no model")),
    "exits": lambda count: fail(SystemExit()),
    "hangs": lambda count: hang(),
}


def bad_reward(folder: str, kind: str) -> None:
    """Train on a reward that is bad on the last rank, and exit as the command line does."""
    runner.TIMEOUT = 1.0 if kind == "hangs" else 100.0

    def reward(images: Tensor, prompts: Sequence[str]) -> Tensor:
        last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        return BAD[kind](len(prompts)) if last else torch.arange(float(len(prompts)))

    def command(args: list[str]) -> int:
        train(config(Path(folder), updates=1), job(reward))
        return 0

    cli.exit_with(command, [])
