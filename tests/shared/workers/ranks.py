"""Updates on ranks with each way of sharding and each optimizer, and weights read by shards, for the tests of the engine."""

import resource
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import init_empty_weights
from helpers import real_torchao
from helpers.large_layers import tower
from helpers.tiny_models import SHARDINGS, Net, Wide, data, gather_state, squared

from fluvial.bench.counting import Collectives
from fluvial.engines import rendezvous
from fluvial.engines.engine import world
from fluvial.engines.engine.engine import Engine, EngineConfig, OptimizerConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import local
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
            share = {key: tensor[mine] for key, tensor in items.items()}
            options: dict[str, Any] = {"count": ITEMS, "micro_batch": MICRO_BATCH, "pad_to": longest}
            if split:  # one update of two terms
                engine.accumulate(share, squared(net), 0.25 * weight[mine], **options)
            engine.update(share, squared(net), (0.75 if split else 1) * weight[mine], **options)
        result[name] = {
            "weights": {key: tensor.tolist() for key, tensor in engine.weights(average=False)},
            "counts": dict(counter.counts),
            "micro_batches": longest,
            "shard": sum(tensor.numel() for tensor in engine._list_shards().values()),
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
    rendezvous.POLL = rendezvous.GRACE = 0.2
    with world.init_world() as joined:
        if joined.rank == 1:
            raise RunError("no memory here")
        time.sleep(300)


def step_optimizers(world: World, *names: Any) -> dict[str, Any]:
    """Return the state by optimizer after three updates of items that are shared out unevenly."""
    found = {}
    for name in names:
        if name in ("adamw8bit", "adamw4bit"):
            real_torchao.load("torchao.optim")
        rate = 1.0 if name == "prodigy" else 0.01
        config = OptimizerConfig(name=name, lr=rate, ema_decay=0.9, schedule="cosine", warmup=2)
        found[name] = _updated(Engine(Wide(), config=config, world=world, updates=8), world)
    return found


def step_in_bfloat16(world: World) -> dict[str, Any]:
    config, sharding = OptimizerConfig(lr=0.01, ema_decay=0.9), EngineConfig(masters="bfloat16")
    return _updated(Engine(Wide(), config=config, world=world, updates=20, sharding=sharding), world)


def _updated(engine: Engine, world: World) -> dict[str, Any]:
    items, weight = data(12)
    mine = slice(0, 12 - world.size + 1) if world.rank == 0 else slice(12 - world.rank, 13 - world.rank)
    share = {key: tensor[mine] for key, tensor in items.items()}
    with torch.compiler.set_stance("force_eager"):  # torchao would compile the step of each shape
        for _ in range(3):
            engine.update(share, squared(engine.module), weight[mine], micro_batch=5)
    return {key: tensor.tolist() for key, tensor in gather_state(engine).items()}


def load_shards(world: World, folder: str) -> dict[str, Any]:
    """Return {offload: {grew: bytes by rank, wrong: tensors that differ from the file's}}."""
    where, result = Path(folder), dict[str, Any]()
    with init_empty_weights(include_buffers=False):
        net = Net()
    # What is imported on the way stays in memory, and is no one's weights.
    ShardedModule(net, list(net.blocks), world, EngineConfig(), weights=where / "net")
    for offload in ("none", "always"):
        with init_empty_weights(include_buffers=False):
            module = tower()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = EngineConfig(offload=offload)
        sharded = ShardedModule(module, list(module.children()), world, config, weights=where)
        grew = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        wrong = []
        with torch.no_grad():
            for number, (name, parameter) in enumerate(sharded.module.named_parameters()):
                shard = local(parameter)
                # Values count up along the first dimension, so that a shard says which rows it is.
                first = -(-parameter.shape[0] // world.size) * world.rank
                rows = torch.arange(first, first + len(shard)) + 10000 * number
                expected = rows.float().reshape(-1, *[1] * (parameter.ndim - 1))
                if not torch.equal(shard, expected.expand_as(shard)):
                    wrong.append(name)
        result[offload] = {"grew": world.gather_items(grew), "wrong": world.gather_items(wrong)}
    return result
