"""Updates the net once with each way of sharding, for test_sharding.py."""

import time
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from helpers.tiny_models import SHARDINGS, Net, data, squared

from fluvial.bench.counting import Collectives
from fluvial.engines import rendezvous
from fluvial.engines.engine import world
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError

ITEMS, MICRO_BATCH = 7, 1


def updates(world: World, split: bool = False) -> dict[str, Any]:
    """Return {name: {weights, counts, shard}} after an update of items that are shared out unevenly, whole or split."""
    result: dict[str, Any] = {}
    items, weight = data(ITEMS)
    bounds = [round(ITEMS * (r / world.size) ** 0.5) for r in range(world.size + 1)]
    mine = slice(bounds[world.rank], bounds[world.rank + 1])
    longest = max(b - a for a, b in pairwise(bounds))
    for name, sharding in SHARDINGS.items():
        if world.size % sharding.get("replicas", 1):
            continue
        net = Net()
        config = EngineConfig(**sharding)
        with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):  # one process runs inductor's
            engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), world, updates=1, sharding=config)
        if sharding.get("offload") == "phases":
            engine.offload()
            engine.onload()
        with Collectives() as counter:
            local = {key: tensor[mine] for key, tensor in items.items()}
            options: dict[str, Any] = {"count": ITEMS, "micro_batch": MICRO_BATCH, "pad_to": longest}
            if split:  # one update of two terms
                engine.accumulate(local, squared(net), 0.25 * weight[mine], **options)
            engine.update(local, squared(net), (0.75 if split else 1) * weight[mine], **options)
        result[name] = {
            "weights": {key: tensor.tolist() for key, tensor in engine.weights(average=False)},
            "counts": dict(counter.counts),
            "micro_batches": longest,
            "shard": sum(tensor.numel() for tensor in engine._local().values()),
        }
    return result


def measure(world: World) -> dict[str, Any]:
    """Return {updates, split, passes}: the updates, those of two terms, and the rows of each rank's passes."""
    result: dict[str, Any] = {"updates": updates(world)}
    if world.size == 2:
        result |= {"split": updates(world, split=True), "passes": world.gather_items(passes(world))}
    return result


def passes(world: World) -> list[int]:
    """Return the rows of each pass of an update that gets the micro-batch alone; rank 0 has one item, others 7."""
    net, rows = Net(), list[int]()
    engine = Engine(net, list(net.blocks), OptimizerConfig(lr=0.01), world, updates=1)
    loss = squared(engine.module)

    def counted(items: dict[str, Any]) -> Any:
        rows.append(len(items["x"]))
        return loss(items)

    engine.update(data(7 if world.rank else 1)[0], counted, micro_batch=3)
    return rows


def one_raises() -> None:
    """Raise on rank 1 while rank 0 waits for it as in a collective of NCCL, where nothing tells it."""
    rendezvous.LOOK = rendezvous.GRACE = 0.2
    with world.init_world() as joined:
        if joined.rank == 1:
            raise RunError("no memory here")
        time.sleep(300)
