"""The engine's update counted, on one process and on two: collectives, host reads, memory, operations, and the gradient."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fluvial.bench.counting import Collectives, HostReads
from fluvial.bench.update.cases import (
    ETA,
    MODEL,
    OPTIMIZER,
    SCALE,
    SIZES,
    UpdateCase,
    UpdateConfig,
    make_rollout,
    update_engine,
)
from fluvial.bench.update.measure import COMPARED, ComparedUpdates, CountRow, summarize
from fluvial.core.random import key
from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import init_world
from fluvial.engines.sampling.generate import Chunk, Guidance, Requests, Sampling, StochasticSteps, generate, move_schedule
from fluvial.models import LoraConfig, add_lora
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.handwriting.model import CodeCond
from fluvial.models.pipelines.sd3 import SD3

pytestmark = pytest.mark.long

UNITS = 3  # two blocks, and the rest of the model


@pytest.mark.parametrize("ranks", [1, 2])
def test_counts_of_an_update(ranks: int) -> None:
    """Of every guidance mode, number of recorded steps and number of micro-batches.

    A unit is gathered and reduced once. One process alone talks to nobody. With comm=reshard it is gathered in the forward
    and in the backward pass; with guidance in two passes, blocks in both, the root in one more. The host reads once.
    """
    result: dict[str, Any] = launch.on_ranks(ranks, "workers.updates:measure", timeout=400)[0]
    modes = {"keep": {"off", "one", "two"}, "checkpointed": {"two"}}
    for sharding in ("keep", "checkpointed", "reshard", "every"):
        rows = [row for row in result["counts"] if row["sharding"] == sharding]
        assert {row["guidance"] for row in rows} == modes.get(sharding, modes["keep"])
        assert ({row["steps"] for row in rows}, {row["n"] for row in rows}) == ({2, 4, 6}, {1, 2, 3})
        for row in rows:
            a_micro_batch = 4 * (UNITS - 1) + 3 if row["guidance"] == "two" else 2 * UNITS
            gathers = a_micro_batch * row["n"] if sharding == "reshard" else UNITS
            scatters = UNITS * row["n"] if sharding == "every" else UNITS
            assert (row["gathers"], row["scatters"]) == ((gathers, scatters) if ranks > 1 else (0, 0)), row
            assert (row["reads"], row["others"]) == ({"tolist": 1}, 2 if ranks > 1 else 0), row
    assert result["peaks"]["10"] == pytest.approx(result["peaks"]["2"], rel=0.02)
    # To float32's rounding, which guidance of 4.5 makes larger; the gradient of the conditional half is another.
    sides = {"baseline": (0, 1e-5), "two": (0, 3e-6), "conditional": (0.1, math.inf)}
    for side, (low, high) in sides.items():
        distances = [value for name, value in result["gradients"].items() if name.endswith(side)]
        assert distances
        assert all(low <= value < high for value in distances), side


SAMPLES, STEPS = 8, 10
PROMPTS = [Prompt("1234")] * SAMPLES
MARGIN = 1.02
# What was reached. flow_grpo's loop dispatches 113 and 253.
ROLLOUT, UPDATE = 97.7, 183.3


class Dispatched(TorchDispatchMode):
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


def roll(engine: Engine, settings: Sampling) -> list[Chunk]:
    requests = Requests(PROMPTS, range(SAMPLES), key(3))
    with engine.inference() as module:
        return list(generate(MODEL, module, requests, settings, micro_batch=SAMPLES))


def test_operations_and_host_reads_per_sample_and_step() -> None:
    """A rollout reads nothing, because its table is made on the host; an update reads its numbers once.

    The model is the small SD3 transformer with LoRA of rank 16 on attention, with guidance in float32.
    """
    case = UpdateCase(SIZES["small"], "lora", STEPS, guidance=True, samples=SAMPLES, micro_batch=SAMPLES)
    with init_world() as world:
        module = case.size.build("full", world.device)
        add_lora(module, LoraConfig(), SD3.lora_targets)
        engine = Engine(module, MODEL.blocks(module), OPTIMIZER, world, updates=100)
        rollout, schedule = make_rollout(engine, case, world), move_schedule(MODEL.schedule(STEPS), world.device)
        stochastic = StochasticSteps(bind("flow_sde", ETA, schedule.levels), range(STEPS))
        settings = Sampling(case.size.event, schedule, Guidance(SCALE), stochastic=stochastic)
        with HostReads() as encoding:  # reads on the host, before anything is on the device
            settings.guidance.encode(MODEL, PROMPTS)
        works: tuple[tuple[Callable[[], Any], float, int], ...] = (
            (lambda: roll(engine, settings), ROLLOUT, encoding.total),
            (lambda: update_engine(engine, rollout, micro_batch=SAMPLES), UPDATE, 1),
        )
        for work, most, count in works:
            work()
            with Dispatched() as dispatched:
                work()
            assert dispatched.counts.total() / (SAMPLES * STEPS) <= most * MARGIN, dispatched.counts.most_common(20)
            with HostReads() as reads:
                work()
            assert reads.total == count, reads.counts


def gradient_of_guided(**options: Any) -> list[Tensor]:
    size = SIZES["tiny"]
    module = size.build("full", torch.device("cpu")).double()
    generator = torch.Generator().manual_seed(0)
    x, given, negative, pooled, empty = (
        torch.randn(3, *shape, dtype=torch.float64, generator=generator)
        for shape in (size.event, (2, 6), (2, 6), (5,), (5,))
    )
    scale = torch.tensor([1.0, 4.5, 7.0], dtype=torch.float64)
    cond = Guided(CodeCond(given, pooled), CodeCond(negative, empty), scale)
    sigma = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    (guided_velocity(MODEL, module, x, sigma, cond, **options) ** 2).sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_two_forward_passes_are_one_in_float64() -> None:
    one, two = gradient_of_guided(forwards="one"), gradient_of_guided(forwards="two")
    half_one, half_two = (gradient_of_guided(forwards=forwards, gradient="conditional") for forwards in ("one", "two"))
    for left, right in (*zip(one, two, strict=True), *zip(half_one, half_two, strict=True)):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-10)
    assert any(not torch.allclose(left, right, rtol=1e-2) for left, right in zip(one, half_one, strict=True))


def test_host_reads_are_counted() -> None:
    x = torch.arange(3.0)
    table: list[tuple[Any, str]] = [
        (lambda x: x[0].item(), "_local_scalar_dense"),
        (lambda x: bool(x[0]), "_local_scalar_dense"),
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.equal(x, x), "equal"),
    ]
    for read, name in table:
        with HostReads() as reads:
            read(x)
        assert reads.counts == {name: 1}
    with HostReads() as reads, Collectives():
        (x * 2).sum().to("cpu") + x[torch.tensor([0, 2])].sum()
    x.tolist()  # after the context
    assert reads.total == 0


def test_one_command_measures_and_ends_in_json(tmp_path: Path) -> None:
    """From a plain shell: it starts its own world, appends both tables and prints one line of JSON."""
    done = launch.program(
        *("fluvial.bench", "update", "--json", "--out", str(tmp_path)),
        *("--sizes", "tiny", "--train", "full", "--steps", "2", "--counted", "1", "2", "3", "--ranks", "2"),
        *("--samples", "2", "--micro-batch", "1", "--runs", "1"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["keep"]["all_gather_per_block"] == summary["keep"]["reduce_scatter_per_block"] == 1
    assert summary["reshard"]["all_gather_per_block"] == 2 * summary["reshard"]["micro_batches"]
    assert summary["keep"]["host_reads_per_micro_batch"] == summary["reshard"]["host_reads_per_micro_batch"] == 0
    # A block two forward passes and a backward pass through both, and two more to compute the old log-probability again.
    assert summary["baseline"]["all_gather_per_block"] > 4 * summary["baseline"]["micro_batches"]
    assert summary["baseline"]["host_reads_per_micro_batch"] > 7
    assert summary["speedup_vs_baseline"] > 0
    assert summary["gradient_distance"] < 1e-5
    assert len((tmp_path / "update.csv").read_text().splitlines()) == 1 + 5
    assert len((tmp_path / "update-counts.csv").read_text().splitlines()) == 1 + 5 + 5 + 3


def test_the_line_of_json_by_default() -> None:
    """Its keys, and that it takes the worst: the larger counts, the smaller speed-up."""

    def row(provider: str, steps: int, gathers: int) -> CountRow:
        return CountRow(provider, "", "", steps, 2, 5, steps, gathers, 5, 2, 3 * steps + 1, 1000 + steps, "")

    counts = [row(side, steps, gathers) for side in COMPARED for steps in UpdateConfig().counted for gathers in (5, 10)]
    speeds = [
        {"keep": ratio, "baseline": 1.0, "baseline, stored log-probs": 1.25, "reshard": 1.0} for ratio in (9.0, 4.0, 2.0)
    ]
    compared = [
        ComparedUpdates("small", train, steps, 2, 1e-7, speed, speed["keep"] / 1.25, {})
        for train, steps, speed in zip(("full", "lora", "full"), (10, 10, 2), speeds, strict=True)
    ]
    summary = summarize(counts, compared, UpdateConfig().counted)
    assert summary["keep"] == {
        "micro_batches": 10,
        "all_gather_per_block": 2,
        "reduce_scatter_per_block": 1,
        "host_reads_per_micro_batch": 3,
        "peak_bytes_2_steps": 1002,
        "peak_bytes_50_steps": 1050,
    }
    assert summary["speedup_vs_baseline"] == 4.0
    assert summary["speedup_vs_baseline_with_stored_log_probs"] == 3.2


def test_wrong_settings_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"samples": 6}, {"sizes": ("huge",)}, {"steps": (0,)}, {"ranks": ()}, {"runs": 0}]
    for settings in (*wrong, {"counted": (2, 2, 50)}):
        with pytest.raises(ValueError, match=r"^[^\n]*update[^\n]*$"):
            UpdateConfig(**settings)
