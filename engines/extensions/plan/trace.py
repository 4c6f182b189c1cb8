"""The trace of a plan: the peaks of an update and of a rollout's pass, from the program itself on a simulated GPU."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.extensions.plan.check import Loss
from fluvial.engines.extensions.plan.plan import PlanConfig, plan, unit_of
from fluvial.engines.extensions.simulate.simulation import Simulation, simulate
from fluvial.engines.run.log.progress import table
from fluvial.models.lora import adapter_names, add_lora
from fluvial.models.shapes import MODELS, ModelShape, blocks

UNREAD = Path("unread")  # folder of weights, from which a simulated device reads nothing
LINES = 8


class Trace(NamedTuple):
    """Peaks of the phases of a plan, in bytes, and the lines that hold them."""

    update: int
    rollout: int
    update_lines: dict[str, int]
    rollout_lines: dict[str, int]


def trace(name: str, config: PlanConfig) -> Trace:
    """Return the peaks of a plan's update, of two micro-batches at most, and of two passes of its rollout.

    Args:
        name: name of the transformer in the catalogue.
        config: plan.
    """
    model, halves = MODELS[name], 2 if config.guidance else 1
    size, resolution = config.micro_batch or model.micro_batch, config.resolution or model.resolution or 0
    count = size * min(config.micro_batches, 2)
    with simulate(ranks=config.gpus) as simulation:
        engine, others = _engines(model, config, simulation)
        device, phase = simulation.world.device, simulation.phases.of

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
        ledger, found = simulation.mode.ledger, simulation.phases.found
        held = [ledger.find_holders(found[each].peak_entry).lines for each in ("update", "rollout")]
        return Trace(found["update"].peak, found["rollout"].peak, *held)


def _engines(model: ModelShape, config: PlanConfig, simulation: Simulation) -> tuple[Engine, list[Any]]:
    """Return the policy's engine and, where a plan has them, the other networks that learn and the frozen reference."""

    def built() -> nn.Module:
        with torch.device("meta"):
            return nn.Module.to(model.build(), "meta")

    def engine_of(module: nn.Module, parameters: Collection[str] | None = None) -> Engine:
        options: Any = {"updates": 10, "sharding": sharding, "weights": UNREAD, "parameters": parameters}
        return Engine(module, blocks(model, module), config.optimizer, world, **options)

    module, world, sharding = built(), simulation.world, replace(config.engine, compile=False)
    others = [f"other{number}" for number in range(1, config.learners)]
    if config.train == "lora":
        add_lora(module, config.lora, model.lora_targets, adapters=("default", *others), trained=others)
        engine = engine_of(module, [*adapter_names(module, "default").values()])
        names = (adapter_names(module, name).values() for name in others)
        more: list[Any] = [Engine(engine.sharded, config=config.optimizer, parameters=[*each]) for each in names]
    else:
        engine, more = engine_of(module), [engine_of(built()) for _ in others]
    for _ in range((config.reference and config.train == "full") + config.teachers):
        frozen = built().requires_grad_(False)
        more.append(ShardedModule(frozen, blocks(model, frozen), world, sharding, weights=UNREAD))
    return engine, more


def show(name: str, config: PlanConfig, *, console: Console) -> None:
    """Print the closed form beside the trace, and the lines that hold most in the trace."""
    traced, planned = trace(name, config), plan(name, config)
    stored = planned.rollout.trajectory  # a plan's, because the trace makes no rollout
    unit = unit_of(planned.need)
    rows = {
        phase: (unit.of(expected), unit.of(found), f"{expected / found - 1:+.1%}")
        for phase, expected, found in (
            ("update", planned.update.total, traced.update + stored),
            ("rollout", planned.rollout.total, traced.rollout + stored),
        )
    }
    title = f"{name}, {config.train}: {unit.name} on each GPU"
    console.print(table(title, ("plan", "trace", "difference"), rows), highlight=False)
    for phase, lines in (("update", traced.update_lines), ("rollout", traced.rollout_lines)):
        largest = {line: (unit.of(size),) for line, size in list(lines.items())[:LINES]}
        console.print(table(f"held at the peak of the {phase}", (unit.name,), largest), highlight=False)
