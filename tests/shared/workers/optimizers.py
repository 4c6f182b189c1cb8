"""Updates with an optimizer on several ranks, for test_optimizers.py."""

from typing import Any

import torch
from helpers import real_torchao
from helpers.tiny_models import Wide, data, gather_state, squared

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World


def updates(world: World, *names: Any) -> dict[str, Any]:
    """Return the state by optimizer after three updates of items that are shared out unevenly."""
    found = {}
    for name in names:
        if name in ("adamw8bit", "adamw4bit"):
            real_torchao.load("torchao.optim")
        rate = 1.0 if name == "prodigy" else 0.01
        config = OptimizerConfig(name=name, lr=rate, ema_decay=0.9, schedule="cosine", warmup=2)
        found[name] = _updated(Engine(Wide(), config=config, world=world, updates=8), world)
    return found


def updates_in_bfloat16(world: World) -> dict[str, Any]:
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
