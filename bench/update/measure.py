"""Counts and times an update of each side, as one of the ranks that `report` starts."""

import gc
import json
import statistics
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.baselines import PublishedLoop
from fluvial.bench.counting import Collectives, HostReads
from fluvial.bench.harness import Row
from fluvial.bench.update.cases import (
    CUDA,
    MODEL,
    SIZES,
    Case,
    Rollout,
    UpdateConfig,
    build_engine,
    build_published,
    make_rollout,
    update_engine,
)
from fluvial.engines.cli.main import exit_with
from fluvial.engines.fsdp import flops
from fluvial.engines.fsdp.engine import Engine, EngineConfig
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.plan.memory import LiveStorages

COMPARED = ("keep", "reshard", "baseline")  # the sides that the line of JSON describes


class Counts(NamedTuple):
    """Counts of one update on one rank."""

    all_gathers: int
    reduce_scatters: int
    other_collectives: int
    host_reads: int
    peak_bytes: int  # activations, gradients and unsharded parameters: all that was not there before


@dataclass(frozen=True)
class CountRow:
    """Counts of one update of a provider on one rank, with its case."""

    provider: str
    shape: str
    mode: str
    steps: int
    ranks: int
    units: int  # FSDP units: the blocks, and the rest of the model
    micro_batches: int
    all_gathers: int
    reduce_scatters: int
    other_collectives: int
    host_reads: int
    peak_bytes: int
    torch: str


@dataclass(frozen=True)
class Compared:
    """The speed of each side: the median of its ratios to the baseline's time in the same round."""

    size: str
    train: str
    steps: int
    ranks: int
    distance: float  # |g - g'| / |g'| of fluvial's gradient and the baseline's
    speedup: dict[str, float]
    speedup_stored: float  # the engine against the baseline that takes the rollout's log-probabilities
    mfu: dict[str, float]  # from the FLOPs that the engine's update needs; empty if the device's peak is unknown


class Measured(NamedTuple):
    """Everything that was measured with one number of ranks."""

    rows: list[Row]
    counts: list[CountRow]
    compared: list[Compared]


def counted(update: Callable[[], object], side: Engine | PublishedLoop, rollout: Rollout) -> Counts:
    """Count one update. The peak leaves out what is there before: parameters, optimizer state and the rollout."""
    state = [value for values in side.optimizer.state.values() for value in values.values()]
    there = [*side.module.parameters(), *side.module.buffers(), *state, *optree.tree_leaves(rollout)]
    memory = LiveStorages([leaf for leaf in there if isinstance(leaf, Tensor)])
    with Collectives() as collectives, HostReads() as reads, memory:
        update()
    return Counts(collectives.all_gathers, collectives.reduce_scatters, collectives.others, reads.total, memory.peak)


def gradient_distance(one: Engine | PublishedLoop, other: Engine | PublishedLoop, world: World) -> float:
    """Return |g - g'| / |g'| of the gradients of two sides' first updates, which AdamW's first moment holds."""
    sums = torch.zeros(2, dtype=torch.float64)
    for name in one.trainable:
        left, right = (
            side.optimizer.state[side.trainable[name]]["exp_avg"].to_local().double().cpu() for side in (one, other)
        )
        sums += torch.stack([((left - right) ** 2).sum(), (right**2).sum()])
    difference, norm = world.gather(sums[None].to(world.device)).sum(0).sqrt().tolist()
    return difference / norm


class Side(NamedTuple):
    """One way to make the update."""

    trained: Engine | PublishedLoop
    update: Callable[[], object]
    passes: int  # forward and backward passes per update, on one rank


def build_sides(case: Case, world: World) -> tuple[dict[str, Side], Rollout, float]:
    """Return every way to update on one rollout, the rollout, and the relative distance of their gradients.

    Each has made one update, so that its optimizer state exists.
    """
    # Shards, also of a module whose adapters alone are trained.
    keep, published = build_engine(case, world, EngineConfig(replicas=1)), build_published(case, world)
    rollout, size, held = make_rollout(keep, case, world), case.micro_batch, case.samples * case.steps
    theirs = partial(published.update, rollout.stored, micro_batch=size)
    sides = {
        "keep": Side(keep, partial(update_engine, keep, rollout, micro_batch=size), -(-held // size)),
        "keep x4": Side(keep, partial(update_engine, keep, rollout, micro_batch=4 * size), -(-held // (4 * size))),
        "baseline": Side(published, theirs, held // size),
        "baseline, stored log-probs": Side(published, partial(theirs, recompute=False), held // size),
    }
    if not CUDA or world.size > 1:  # on one GPU it is "keep" with more copies, and a third such model may not fit
        reshard = build_engine(case, world, EngineConfig(comm="reshard"))
        sides["reshard"] = Side(reshard, partial(update_engine, reshard, rollout, micro_batch=size), -(-held // size))
    for name in ("keep", "baseline", *(name for name in sides if name == "reshard")):
        sides[name].update()
    distance = max(gradient_distance(sides[name].trained, published, world) for name in sides if name in ("keep", "reshard"))
    return sides, rollout, distance


def count_case(case: Case, world: World, *, name: str, compared: Collection[str] = ()) -> list[CountRow]:
    """Count an update of each side, or only of the sides in `compared`."""
    sides, rollout, _ = build_sides(case, world)
    return [
        CountRow(
            provider,
            _shape(name, case),
            _mode(case, world),
            case.steps,
            world.size,
            len(MODEL.blocks(side.trained.module)) + 1,
            side.passes,
            *counted(side.update, side.trained, rollout),
            torch.__version__,
        )
        for provider, side in sides.items()
        if provider in compared or not compared
    ]


def time_case(case: Case, world: World, *, name: str, runs: int) -> tuple[list[Row], Compared]:
    """Time the sides in turn, and compare each round."""
    sides, _, distance = build_sides(case, world)
    peaks: dict[str, int] = {}
    seconds = harness.alternate(
        runs, {provider: partial(_together, side.update, provider, peaks) for provider, side in sides.items()}
    )
    rows = [
        replace(
            harness.row(
                "update",
                times,
                provider=provider,
                mode=_mode(case, world),
                shape=_shape(name, case),
                amount=case.samples * world.size,
                unit="samples",
                dtype=EngineConfig().compute_dtype(world.device),
            ),
            peak_bytes=peaks.get(provider, 0),
        )
        for provider, times in seconds.items()
    ]

    def speedup(provider: str, baseline: str = "baseline") -> float:
        return statistics.median(b / t for b, t in zip(seconds[baseline], seconds[provider], strict=True))

    mfu: dict[str, float] = {}
    most = flops.peak(world.device, EngineConfig().compute_dtype(world.device))
    if most is not None:
        with flops.FlopCounter() as counter:
            sides["keep"].update()
        mfu = {
            provider: flops.mfu(counter.model, statistics.median(times), peak=most, ranks=1)
            for provider, times in seconds.items()
        }
    ratios = {provider: speedup(provider) for provider in seconds}
    stored = speedup("keep", "baseline, stored log-probs")
    return rows, Compared(name, case.train, case.steps, world.size, distance, ratios, stored, mfu)


def measure(config: UpdateConfig, world: World) -> Measured:
    """Count and time every case with this number of ranks."""
    measured, p = Measured([], [], []), config.micro_batch
    for train in config.train:
        for steps in config.counted if world.size == max(config.ranks) else ():
            name = config.sizes[0]
            case = Case(
                SIZES[name], train, steps, config.guidance, samples=p, micro_batch=p, checkpointing=config.checkpointing
            )
            # With many steps only the compared sides, to save time.
            compared = COMPARED if steps == config.counted[-1] else ()
            measured.counts.extend(count_case(case, world, name=name, compared=compared))
            gc.collect()  # hooks hold modules in reference cycles
    for name in config.sizes:
        for train in config.train:
            for steps in config.steps:
                case = Case(
                    SIZES[name],
                    train,
                    steps,
                    config.guidance,
                    samples=config.samples,
                    micro_batch=p,
                    checkpointing=config.checkpointing,
                )
                rows, ratios = time_case(case, world, name=name, runs=config.runs)
                measured.rows.extend(rows)
                measured.compared.append(ratios)
                gc.collect()
    return measured


def worker(args: list[str]) -> int:
    """Measure as one of the ranks: read the configuration, and write the measurements as JSON."""
    told = json.loads(Path(args[0]).read_text())
    fields_: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    config = UpdateConfig(**fields_)
    with init_world() as world:
        measured = measure(config, world)
        if world.is_main:
            Path(args[1]).write_text(json.dumps({k: [asdict(row) for row in v] for k, v in measured._asdict().items()}))
    return 0


def _together(update: Callable[[], object], provider: str, peaks: dict[str, int]) -> None:
    """Run an update that all ranks start at once; on a GPU record the memory that it takes on top of what is held."""
    dist.barrier()
    held = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    update()
    if CUDA:
        peaks[provider] = max(peaks.get(provider, 0), torch.cuda.max_memory_allocated() - held)


def _mode(case: Case, world: World) -> str:
    return f"{world.size} process(es), {case.train}, {'guidance' if case.guidance else 'no guidance'}"


def _shape(name: str, case: Case) -> str:
    return f"{name}, {case.samples} samples x {case.steps} steps, {case.micro_batch} pairs a pass"


if __name__ == "__main__":
    exit_with(worker, sys.argv[1:])
