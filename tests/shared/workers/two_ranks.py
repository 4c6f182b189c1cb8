"""Notes the calls that every rank must make, for test_two_ranks.py."""

import inspect
import sys
from pathlib import Path
from typing import Any

from helpers.handwriting_jobs import alternating, config, job

from fluvial.engines.engine.world import World
from fluvial.engines.run.trainer import Trainer


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
