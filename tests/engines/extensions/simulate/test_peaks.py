"""Peaks of the simulated device against those of the same updates that run on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.extensions.simulate.simulation import simulate
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models import LoraConfig, add_lora
from fluvial.models.shapes import MODELS, list_blocks

pytestmark = pytest.mark.simulated
MODEL, COUNT = MODELS["handwriting"], 32
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "reshard": {"comm": "reshard"},
    "block": {"checkpointing": "block"},
    "selective": {"checkpointing": "selective"},
    "bfloat16": {"compute": "bfloat16"},
    "bfloat16-reshard": {"compute": "bfloat16", "comm": "reshard"},
    "every": {"compute": "bfloat16", "grad_sync": "every"},
}


def updates(world: World, train: str, sharding: EngineConfig) -> Any:
    """Return a function that takes an update of two micro-batches, after a first one, and what it holds."""
    module = MODEL.build()
    if train == "lora":
        add_lora(module, LoraConfig(rank=8), MODEL.lora_targets)
    engine = Engine(module, list_blocks(MODEL, module), OptimizerConfig(ema_decay=0.9), world, sharding=sharding)
    inputs = {key: torch.zeros(v.shape, device=world.device) for key, v in MODEL.inputs(COUNT, 0).items()}

    def loss(rows: dict[str, Tensor]) -> Tensor:
        return engine.module(**rows, return_dict=False)[0].float().square().flatten(1).sum(1)

    def update() -> None:
        engine.update(inputs, loss, torch.ones(COUNT, device=world.device), count=COUNT, micro_batch=COUNT // 2)

    update()
    return engine, inputs, update


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_simulated_peak_is_that_of_the_same_update_on_the_cpu(train: str, name: str) -> None:
    """Within 5 %: both run the same program, and only attention has another kernel."""
    sharding = EngineConfig(**{"compute": "float32", "compile": False, **SETTINGS[name]})
    with simulate() as simulation:
        engine, inputs, update = updates(simulation.world, train, sharding)
        simulation.mode.ledger.reset_peak()
        update()
        simulated = simulation.mode.ledger.peak
    with init_world() as world:
        engine, inputs, update = updates(world, train, replace(sharding))
        moments = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        kept = [*engine.module.parameters(), *engine.module.buffers(), *moments, *engine.average.values(), *inputs.values()]
        with LiveStorages() as live:
            for tensor in kept:
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).view(-1)
            update()
        measured = live.peak
    assert simulated == pytest.approx(measured, rel=0.05)
