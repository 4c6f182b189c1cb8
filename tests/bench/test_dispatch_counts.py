"""Dispatched operations and host reads of a rollout and of an update, per (sample, step): the overhead on a small model.

The model is the small SD3 transformer of `bench.update` with LoRA of rank 16 on attention: 8 samples, 10 recorded steps,
guidance, float32, 8 items per pass.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluvial.bench.counting import HostReads
from fluvial.bench.update.cases import ETA, MODEL, OPTIMIZER, SCALE, SIZES, Rollout, UpdateCase, make_rollout, update_engine
from fluvial.core.random import key
from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.sampling.generate import Chunk, Guidance, Requests, Sampling, StochasticSteps, generate, on_device
from fluvial.models import LoraConfig, add_lora
from fluvial.models.pipelines.sd3 import SD3

pytestmark = pytest.mark.long

SAMPLES, STEPS = 8, 10
PROMPTS = [Prompt("1234")] * SAMPLES
MARGIN = 1.02
# What was reached. flow_grpo's loop dispatches 113 and 253.
ROLLOUT, UPDATE = 97.7, 183.3


class Operations(TorchDispatchMode):
    """Counts dispatched aten operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "aten":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def trained() -> Any:
    with init_world() as world:
        case = UpdateCase(SIZES["small"], "lora", STEPS, guidance=True, samples=SAMPLES, micro_batch=SAMPLES)
        module = case.size.build("full", world.device)
        add_lora(module, LoraConfig(), SD3.lora_targets)
        engine = Engine(module, MODEL.blocks(module), OPTIMIZER, world, updates=100)
        yield engine, make_rollout(engine, case, world)


def sampling(world: World) -> Sampling:
    schedule = on_device(MODEL.schedule(STEPS), world.device)
    steps = StochasticSteps(bind("flow_sde", ETA, schedule.levels), range(STEPS))
    return Sampling(SIZES["small"].event, schedule, Guidance(SCALE), stochastic=steps)


def roll(engine: Engine, settings: Sampling) -> list[Chunk]:
    requests = Requests(PROMPTS, range(SAMPLES), key(3))
    with engine.inference() as module:
        return list(generate(MODEL, module, requests, settings, micro_batch=SAMPLES))


def test_operations_and_host_reads(trained: tuple[Engine, Rollout]) -> None:
    """A rollout reads nothing, because its table is made on the host; an update reads its numbers once."""
    engine, rollout = trained
    settings = sampling(engine.world)
    with HostReads() as encoding:  # reads on the host, before anything is on the device
        settings.guidance.encode(MODEL, PROMPTS)
    works: tuple[tuple[Callable[[], Any], float, int], ...] = (
        (lambda: roll(engine, settings), ROLLOUT, encoding.total),
        (lambda: update_engine(engine, rollout, micro_batch=SAMPLES), UPDATE, 1),
    )
    for work, most, count in works:
        work()
        with Operations() as operations:
            work()
        assert operations.counts.total() / (SAMPLES * STEPS) <= most * MARGIN, operations.counts.most_common(20)
        with HostReads() as reads:
            work()
        assert reads.total == count, reads.counts
