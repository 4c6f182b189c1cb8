"""Counts the engine's collectives and returns the weights after an update, for test_two_ranks.py."""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from helpers.handwriting_jobs import alternating, config, job
from helpers.tiny_models import Net, data, squared

from fluvial.bench.counting import Collectives
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.run.trainer import Trainer


def updates(world: World) -> dict[str, Any]:
    """Return {counts: {comm: {n: {...}}}, weights: {...}, info, skipped, messages}."""
    result: dict[str, Any] = {"counts": {}, "weights": {}}
    comm: Any
    for comm in ("keep", "reshard"):
        result["counts"][comm] = {}
        for n in (1, 2, 8):
            net = Net()
            engine = Engine(net, list(net.blocks), OptimizerConfig(), world, updates=1, sharding=EngineConfig(comm=comm))
            items, weight = data(3 * n)
            with Collectives() as counter:
                engine.update(items, squared(net), weight, count=1, micro_batch=3, pad_to=3 * n)
            result["counts"][comm][n] = dict(counter.counts)

    # Uneven ranks: 5 items here, 2 there.
    items, weight = data(7)
    mine = slice(0, 5) if world.rank == 0 else slice(5, 7)
    for comm in ("keep", "reshard"):
        net = Net()
        engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), world, updates=1, sharding=EngineConfig(comm=comm))
        share = {name: tensor[mine] for name, tensor in items.items()}
        info = engine.update(share, squared(net), weight[mine], count=7, micro_batch=2, pad_to=5)
        result["weights"][comm] = {name: tensor.tolist() for name, tensor in engine.weights(average=False)}
        result["info"] = info._asdict()

    # A gradient that is not finite on one rank skips the step on both.
    before = [tensor for _, tensor in engine.weights(average=False)]
    if world.rank == 1:
        share["y"][0] = torch.nan
    info = engine.update(share, squared(net), weight[mine], count=7, micro_batch=2, pad_to=5)
    after = [tensor for _, tensor in engine.weights(average=False)]
    result["skipped"] = info.skipped and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    # A rank that gives up takes the other with it.
    try:
        with world.agreed():
            if world.rank == 1:
                raise RunError("out of paper")
    except RunError as error:
        messages = [None, None]
        torch.distributed.all_gather_object(messages, f"{type(error).__name__}: {error}")
        result["messages"] = messages
    return result


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
