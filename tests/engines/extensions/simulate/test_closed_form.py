"""The closed form of `fluvial plan` against the trace of the program on a simulated GPU."""

from collections.abc import Collection
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.extensions.plan.check import Loss
from fluvial.engines.extensions.plan.plan import PlanConfig, Train, plan
from fluvial.engines.extensions.simulate.simulation import Simulation, simulate
from fluvial.models.lora import add_lora, map_adapter_names
from fluvial.models.shapes import MODELS, ModelShape, list_blocks

pytestmark = pytest.mark.simulated
ABOVE, BELOW = 0.04, 0.01  # the closed form may be this much above the trace, and hardly below it
ENGINES: list[dict[str, Any]] = [
    {},
    {"comm": "reshard"},
    {"checkpointing": "block"},
    {"checkpointing": "block", "grad_sync": "every"},
]

SWAPS: list[dict[str, Any]] = [{"offload": "blocks"}, {"offload": 2, "base": "int8", "checkpointing": "block"}]


UNREAD = Path("unread")  # folder of weights, from which a simulated device reads nothing


class Trace(NamedTuple):
    """Peaks of the phases of a plan, in bytes."""

    update: int
    rollout: int


def trace(name: str, config: PlanConfig) -> Trace:
    """Return the peaks of a plan's update, of two micro-batches at most, and of two passes of its rollout.

    Args:
        name: name of the transformer in the catalogue.
        config: plan.
    """
    model, halves = MODELS[name], 2 if config.guidance else 1
    size, resolution = config.micro_batch or model.micro_batch, config.pipeline.side or model.resolution or 0
    count = size * min(config.micro_batches, 2)
    with simulate(ranks=config.gpus) as simulation:
        engine, others = _engines(model, config, simulation)
        device, phase = simulation.world.device, simulation.phases.enter

        def inputs(samples: int) -> dict[str, Any]:
            found = model.inputs(samples * halves, resolution)
            return {key: torch.empty_like(v, device=device) if isinstance(v, Tensor) else v for key, v in found.items()}

        def loss_fn(rows: Tensor) -> tuple[Tensor, Loss]:
            out: Tensor = engine.module(**inputs(len(rows)), return_dict=False)[0]
            loss = out.float().unflatten(0, (-1, halves))[:, 0].square().flatten(1).sum(1)
            return loss, Loss(loss.detach())

        rows = torch.ones(count, device=device)
        for name_of_phase in ("first", "update"):  # the first one begins without gradients
            with phase(name_of_phase):
                engine.update(rows, loss_fn, rows, count=count, micro_batch=size, pad_to=count)
        if config.engine.offload == "phases":
            engine.offload(parameters=False)
        with phase("rollout"), engine.inference() as module:
            batch = inputs(size)
            for _ in range(2):
                module(**batch, return_dict=False)
        del others
        found = simulation.phases.by_name
        return Trace(found["update"].peak, found["rollout"].peak)


def _engines(model: ModelShape, config: PlanConfig, simulation: Simulation) -> tuple[Engine, list[Any]]:
    """Return the policy's engine and, where a plan has them, the other networks that learn and the frozen reference."""

    def build_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Module.to(model.build(), "meta")

    def engine_of(module: nn.Module, parameters: Collection[str] | None = None) -> Engine:
        options: Any = {"updates": 10, "sharding": sharding, "weights": UNREAD, "parameters": parameters}
        return Engine(module, list_blocks(model, module), config.optimizer, world, **options)

    module, world, sharding = build_meta(), simulation.world, replace(config.engine, compile=False)
    others = [f"other{number}" for number in range(1, config.learners)]
    if config.train == "lora":
        add_lora(module, config.lora, model.lora_targets, adapters=("default", *others), trained=others)
        engine = engine_of(module, [*map_adapter_names(module, "default").values()])
        names = (map_adapter_names(module, name).values() for name in others)
        more: list[Any] = [Engine(engine.sharded, config=config.optimizer, parameters=[*each]) for each in names]
    else:
        engine, more = engine_of(module), [engine_of(build_meta()) for _ in others]
    for _ in range((config.reference and config.train == "full") + config.teachers):
        frozen = build_meta().requires_grad_(False)
        more.append(ShardedModule(frozen, list_blocks(model, frozen), world, sharding, weights=UNREAD))
    return engine, more


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(
    ("engine", "train"), [*product(ENGINES, ("lora", "full")), *((swap, "lora") for swap in SWAPS)], ids=str
)
def test_a_plan_is_held_to_the_trace(engine: dict[str, Any], train: Train, gpus: int) -> None:
    config = PlanConfig(gpus=gpus, train=train, micro_batch=16, engine=EngineConfig(**engine))
    traced, planned = trace("handwriting", config), plan("handwriting", config)
    stored = planned.rollout.trajectory  # the trace makes no rollout
    for expected, found in ((planned.update.total, traced.update), (planned.rollout.total, traced.rollout + stored)):
        assert 1 - BELOW <= expected / found <= 1 + ABOVE
