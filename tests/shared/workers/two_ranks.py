"""Counts the engine's collectives and returns the weights after an update, for test_two_ranks.py."""

from typing import Any

import torch
from helpers.tiny_models import Net, data, squared

from fluvial.bench.update.measure import Collectives
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError


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
