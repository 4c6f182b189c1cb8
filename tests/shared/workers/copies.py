"""Trains adapters on ranks that hold whole copies and on ranks that hold shards, for test_copies.py."""

import math
from pathlib import Path
from typing import Any

import optree
import torch
from helpers.lora_model import perturb
from helpers.tiny_models import Info, Wide, data, gather_state
from torch import Tensor, nn

from fluvial.bench.counting import Collectives, HostReads
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine, UpdateInfo
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import write_lora
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.models.lora import LoraConfig, add_lora, blend_adapter, use_adapter

ITEMS, MICRO_BATCH = 4, 1
KINDS: dict[str, dict[str, Any]] = {"copies": {}, "shards": {"replicas": 1}}  # adapters are copied by default


def adapted() -> nn.Module:
    module = Wide()
    add_lora(module, LoraConfig(rank=2, alpha=3.0), ("first", "last"), adapters=("default", "old"))
    perturb(module, "default", seed=0)
    perturb(module, "old", seed=1)
    return module


def start(world: World, **sharding: Any) -> Engine:
    module = adapted()
    config = OptimizerConfig(lr=1e-3, ema_decay=0.9)
    return Engine(module, [module.get_submodule("first")], config, world, updates=9, sharding=EngineConfig(**sharding))


def loss_of(module: nn.Module) -> Any:
    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        with torch.no_grad():
            with use_adapter(module, "old"):
                target = items["y"] + module(items["x"])
            with use_adapter(module, None):
                target = target - module(items["x"])
        error = (module(items["x"]) - target) ** 2
        return error, Info(error.detach())

    return loss


def update(engine: Engine, *, poisoned: bool = False) -> UpdateInfo:
    """Take an update, each rank on its part of the items; the last item may be NaN."""
    (items, weight), each = data(ITEMS), ITEMS // engine.world.size
    if poisoned:
        items["x"][-1] = math.nan
    rows = slice(engine.world.rank * each, (engine.world.rank + 1) * each)
    mine = {name: tensor[rows] for name, tensor in items.items()}
    return engine.update(mine, loss_of(engine.module), weight[rows], count=ITEMS, micro_batch=MICRO_BATCH, pad_to=each)


def train(engine: Engine) -> list[bool]:
    """Take three updates, of which the second is poisoned, and return which were skipped; `old` follows the policy."""
    skipped = [update(engine, poisoned=poisoned).skipped for poisoned in (False, True, False)]
    blend_adapter(engine.module, "default", "old", 0.5)
    return skipped


def restored(path: Path, world: World, **sharding: Any) -> Engine:
    engine = start(world, **sharding)
    state = optree.tree_map(torch.empty_like, engine.state())
    counters = checkpoint.load(path, state, fingerprint={}, world=world)
    engine.restore(state, counters)
    return engine


def checkpoints(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ends: dict[str, dict[str, Tensor]] = {}
    for kind, sharding in KINDS.items():
        engine, place = start(world, **sharding), Path(folder) / kind
        skipped = train(engine)
        state = gather_state(engine)
        checkpoint.save(place, engine.state(), engine.counters(), update=3, fingerprint={}, world=world, keep=1)
        write_lora(engine.module, place / "export", world=world)
        with Collectives() as collectives, HostReads() as reads:
            update(engine)
        ends[kind] = gather_state(engine)
        other = restored(place / "000003", world, **KINDS["shards" if kind == "copies" else "copies"])
        seen = gather_state(other)
        update(other)
        found[kind] = {
            "whole": engine.sharded.is_whole,
            "skipped": skipped,
            "counters": engine.counters(),
            "collectives": dict(collectives.counts),
            "reads": reads.total,
            "restored as the other": all(torch.equal(seen[name], tensor) for name, tensor in state.items()),
            "goes on as the other": apart(gather_state(other), ends[kind]),
        }
    found["apart"] = apart(ends["copies"], ends["shards"])
    total = float(sum(tensor.double().sum() for tensor in ends["copies"].values()))
    found["ranks alike"] = len(set(world.gather_items(total))) == 1
    return found


def apart(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest mean distance of two states' tensors, relative to the mean size of each."""
    assert left.keys() == right.keys()
    return max(float((left[n] - right[n]).abs().mean() / (right[n].abs().mean() + 1e-12)) for n in right)
