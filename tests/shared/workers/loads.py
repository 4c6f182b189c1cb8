"""Loads a model shard by shard and measures the memory that it takes, for test_loading.py."""

import resource
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from helpers.large_layers import tower
from helpers.tiny_models import Net

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World


def load(world: World, folder: str) -> dict[str, Any]:
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
