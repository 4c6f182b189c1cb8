"""The closed form of `fluvial plan` against the trace of the program on a simulated GPU."""

from itertools import product
from typing import Any

import pytest

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.extensions.plan.check import trace
from fluvial.engines.extensions.plan.plan import PlanConfig, Train, plan

pytestmark = pytest.mark.simulated
ABOVE, BELOW = 0.04, 0.01  # the closed form may be this much above the trace, and hardly below it
ENGINES: list[dict[str, Any]] = [
    {},
    {"comm": "reshard"},
    {"checkpointing": "block"},
    {"checkpointing": "block", "grad_sync": "every"},
]


SWAPS: list[dict[str, Any]] = [{"offload": "blocks"}, {"offload": 2, "base": "int8", "checkpointing": "block"}]


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
