"""What holds for every way in which an engine trains: its state is saved, restored and moved to the host to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import lora_model, real_torchao
from helpers.marks import long
from helpers.tiny_models import Wide, gather_state, take_updates
from torch import Tensor

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.optimizers import OPTIMIZERS
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.models.quantised import Base, find_quantised

# Settings of the optimizer and of the engine; a new way is a row.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"name": name}, {}) for name in sorted(OPTIMIZERS)},
    "bfloat16": ({}, {"compute": "bfloat16"}),
    "masters": ({}, {"masters": "bfloat16"}),
    "masters, sgd": ({"name": "sgd"}, {"masters": "bfloat16", "compute": "bfloat16"}),
    "shards": ({}, {"offload": "always"}),
    "shards, reshard": ({}, {"offload": "always", "comm": "reshard", "checkpointing": "block"}),
    **{base: ({}, {"base": base}) for base in get_args(Base)},
}
QUICK = [long(name) if name in get_args(Base) else name for name in WAYS]


@contextmanager
def started(way: str, one: World, *, seeds: tuple[int, ...]) -> Iterator[list[Engine]]:
    """Yield an engine for each seed of its weights, or of its adapters over a quantised base."""
    chosen, sharding = WAYS[way]
    lr = 1.0 if chosen.get("name") == "prodigy" else 0.01  # of which it makes a step size
    config = OptimizerConfig(**{"lr": lr, "ema_decay": 0.9, "schedule": "cosine", "warmup": 2, **chosen})

    def build(seed: int) -> Engine:
        module = lora_model.adapted(seed=seed) if "base" in sharding else Wide(seed)
        blocks = lora_model.MODEL.blocks(module) if "base" in sharding else [module.get_submodule("first")]
        return Engine(module, blocks, config, one, updates=20, sharding=EngineConfig(**sharding))

    with real_torchao.available(config.name):
        yield [build(seed) for seed in seeds]


def steps(engine: Engine, count: int) -> list[float]:
    """Take updates, and return their losses."""

    def loss(items: dict[str, Tensor]) -> Tensor:
        return lora_model.velocity(engine.module, items).square().flatten(1).mean(1)

    if isinstance(engine.module, Wide):
        return take_updates(engine, count)
    return [engine.update(lora_model.inputs(4), loss, micro_batch=2).loss for _ in range(count)]


def differing(left: Engine, right: Engine) -> set[str]:
    """Return which tensors of two engines' states are not equal."""
    found, expected = gather_state(left), gather_state(right)
    assert found.keys() == expected.keys()
    return {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}


@pytest.mark.parametrize("way", QUICK)
def test_an_engine_resumes_to_the_bit(one: World, tmp_path: Path, way: str) -> None:
    """From a checkpoint on disk into an engine over other weights, whose own state has moved."""
    told: dict[str, Any] = {"fingerprint": {}, "world": one}
    with started(way, one, seeds=(0, 1)) as (straight, resumed):
        steps(straight, 3)
        path = checkpoint.save(tmp_path, straight.state(), straight.counters(), update=3, keep=1, **told)
        expected = steps(straight, 3)
        steps(resumed, 2)
        state = resumed.state()
        resumed.restore(state, checkpoint.load(path, state, **told))
        assert resumed.counters()["updates"] == 3
        assert steps(resumed, 3) == expected
        assert differing(resumed, straight) == set()
        assert not any("base_layer" in name or "codes" in name.split(".") for name in state if name.startswith("weight."))


@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("way", QUICK)
def test_everything_waits_on_the_host(one: World, way: str, parameters: bool) -> None:
    """Storages on the device are empty meanwhile, values come back to the bit, and training goes on as without it."""
    with started(way, one, seeds=(0, 0)) as (engine, straight):
        for each in (engine, straight):
            steps(each, 2)
        codes = {f"codes.{name}": layer.quantised.codes for name, layer in find_quantised(engine.module).items()}
        held = {**engine.state(), **codes}  # codes are in no checkpoint
        stay = () if parameters else ("weight.", "codes.")
        for _ in range(2):
            engine.offload(parameters=parameters)
            for name, tensor in held.items():
                assert (local(tensor).untyped_storage().nbytes() > 0) == name.startswith(stay), name
            engine.onload()
            assert differing(engine, straight) == set()
        assert steps(engine, 2) == steps(straight, 2)
        assert differing(engine, straight) == set()
