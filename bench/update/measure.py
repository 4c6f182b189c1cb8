"""Counts and times an update of each side on every number of ranks, appends the rows to the tables, and prints them.

python -P -m fluvial.bench update --json                                  the line of JSON, in some minutes
python -P -m fluvial.bench update --ranks 1 2 --steps 2 4 10 --json       every row
"""

import gc
import json
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.baselines import PublishedLoop
from fluvial.bench.counting import Collectives, HostReads
from fluvial.bench.harness import Measurement
from fluvial.bench.update.cases import (
    CUDA,
    MODEL,
    SIZES,
    Rollout,
    UpdateCase,
    UpdateConfig,
    build_engine,
    build_published,
    make_rollout,
    update_engine,
)
from fluvial.engines.engine.engine import Engine, EngineConfig
from fluvial.engines.engine.shards import local
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.run import metrics as utilisation
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.flops import FlopCounter

COMPARED = ("keep", "reshard", "baseline")  # the sides that the line of JSON describes


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
    peak_bytes: int  # activations, gradients and unsharded parameters: all that was not there before
    torch: str


@dataclass(frozen=True)
class ComparedUpdates:
    """The speed of each side: the median of its ratios to the baseline's time in the same round."""

    size: str
    train: str
    steps: int
    ranks: int
    distance: float  # |g - g'| / |g'| of fluvial's gradient and the baseline's
    speedup: dict[str, float]
    speedup_stored: float  # the engine against the baseline that takes the rollout's log-probabilities
    mfu: dict[str, float]  # from the FLOPs that the engine's update needs; empty if the device's peak is unknown


class MeasuredUpdate(NamedTuple):
    """Everything that was measured with one number of ranks."""

    rows: list[Measurement]
    counts: list[CountRow]
    compared: list[ComparedUpdates]


def count_update(update: Callable[[], object], side: Engine | PublishedLoop, rollout: Rollout) -> dict[str, int]:
    """Return the counts of one update by their names in `CountRow`.

    The peak leaves out the memory held before the update: parameters, optimizer state and the rollout.
    """
    state = [value for values in side.optimizer.state.values() for value in values.values()]
    present = [*side.module.parameters(), *side.module.buffers(), *state, *optree.tree_leaves(rollout)]
    memory = LiveStorages([leaf for leaf in present if isinstance(leaf, Tensor)])
    with Collectives() as collectives, HostReads() as reads, memory:
        update()
    return {
        "all_gathers": collectives.all_gathers,
        "reduce_scatters": collectives.reduce_scatters,
        "other_collectives": collectives.others,
        "host_reads": reads.total,
        "peak_bytes": memory.peak,
    }


def measure_gradient_distance(one: Engine | PublishedLoop, other: Engine | PublishedLoop, world: World) -> float:
    """Return |g - g'| / |g'| of the gradients of two sides' first updates, which AdamW's first moment holds."""
    sums = torch.zeros(2, dtype=torch.float64)
    for name in one.trainable:
        left, right = (local(side.optimizer.state[side.trainable[name]]["exp_avg"]).double().cpu() for side in (one, other))
        sums += torch.stack([((left - right) ** 2).sum(), (right**2).sum()])
    difference, norm = world.gather(sums[None].to(world.device)).sum(0).sqrt().tolist()
    return difference / norm


class Side(NamedTuple):
    """One implementation of the update."""

    trained: Engine | PublishedLoop
    update: Callable[[], object]
    passes: int  # forward and backward passes per update, on one rank


def build_sides(case: UpdateCase, world: World) -> tuple[dict[str, Side], Rollout, float]:
    """Return every implementation of the update, the rollout, and the largest relative distance of their gradients.

    Each compared one has made one update, so that its optimizer state exists.
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
    distance = max(
        measure_gradient_distance(sides[name].trained, published, world) for name in sides if name in ("keep", "reshard")
    )
    return sides, rollout, distance


def count_case(case: UpdateCase, world: World, *, name: str, compared: Collection[str] = ()) -> list[CountRow]:
    """Count an update of each side, or only of the sides in `compared`."""
    sides, rollout, _ = build_sides(case, world)
    return [
        CountRow(
            provider,
            _format_shape(name, case),
            _format_mode(case, world),
            case.steps,
            world.size,
            len(MODEL.blocks(side.trained.module)) + 1,
            side.passes,
            **count_update(side.update, side.trained, rollout),
            torch=torch.__version__,
        )
        for provider, side in sides.items()
        if provider in compared or not compared
    ]


def time_case(case: UpdateCase, world: World, *, name: str, runs: int) -> tuple[list[Measurement], ComparedUpdates]:
    """Time an update of each side in turn, and compare the times of each round."""
    sides, _, distance = build_sides(case, world)
    peaks: dict[str, int] = {}
    seconds = harness.alternate(
        runs, {provider: partial(_run_together, side.update, provider, peaks) for provider, side in sides.items()}
    )
    rows = [
        replace(
            harness.make_row(
                "update",
                times,
                provider=provider,
                mode=_format_mode(case, world),
                shape=_format_shape(name, case),
                amount=case.samples * world.size,
                unit="samples",
                dtype=EngineConfig().compute_dtype(world.device),
            ),
            peak_bytes=peaks.get(provider, 0),
        )
        for provider, times in seconds.items()
    ]

    def find_speedup(provider: str, baseline: str = "baseline") -> float:
        return statistics.median(b / t for b, t in zip(seconds[baseline], seconds[provider], strict=True))

    mfu: dict[str, float] = {}
    most = utilisation.find_peak(world.device, EngineConfig().compute_dtype(world.device))
    if most is not None:
        with FlopCounter() as counter:
            sides["keep"].update()
        mfu = {
            provider: utilisation.compute_mfu(counter.model, statistics.median(times), peak=most, ranks=1)
            for provider, times in seconds.items()
        }
    ratios = {provider: find_speedup(provider) for provider in seconds}
    stored = find_speedup("keep", "baseline, stored log-probs")
    return rows, ComparedUpdates(name, case.train, case.steps, world.size, distance, ratios, stored, mfu)


def measure(config: UpdateConfig) -> MeasuredUpdate:
    """Count and time every case, as one rank of this process group."""

    def make_case(name: str, train: Literal["lora", "full"], steps: int, samples: int) -> UpdateCase:
        return UpdateCase(SIZES[name], train, steps, config.guidance, samples, config.micro_batch, config.checkpointing)

    measured = MeasuredUpdate([], [], [])
    with init_world() as world:
        for train in config.train:
            for steps in config.counted if world.size == max(config.ranks) else ():
                name = config.sizes[0]
                # With many steps only the compared sides, to save time.
                compared = COMPARED if steps == config.counted[-1] else ()
                few = make_case(name, train, steps, config.micro_batch)
                measured.counts.extend(count_case(few, world, name=name, compared=compared))
                gc.collect()  # hooks hold modules in reference cycles
        for name in config.sizes:
            for train in config.train:
                for steps in config.steps:
                    rows, ratios = time_case(
                        make_case(name, train, steps, config.samples), world, name=name, runs=config.runs
                    )
                    measured.rows.extend(rows)
                    measured.compared.append(ratios)
                    gc.collect()
    return measured


def _run_together(update: Callable[[], object], provider: str, peaks: dict[str, int]) -> None:
    """Run an update that all ranks start at once; on a GPU record how much memory it takes beyond what is held before."""
    dist.barrier()
    held = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    update()
    if CUDA:
        peaks[provider] = max(peaks.get(provider, 0), torch.cuda.max_memory_allocated() - held)


def _format_mode(case: UpdateCase, world: World) -> str:
    return f"{world.size} process(es), {case.train}, {'guidance' if case.guidance else 'no guidance'}"


def _format_shape(name: str, case: UpdateCase) -> str:
    return f"{name}, {case.samples} samples x {case.steps} steps, {case.micro_batch} pairs a pass"


def run(config: UpdateConfig) -> dict[str, Any]:
    """Measure with each number of ranks, append to update.csv and update-counts.csv, print, and return the summary.

    Raises:
        RunError: the processes failed; their messages are on standard error.
    """
    measured = [harness.run_in_processes(measure, config, ranks=ranks, threads=config.threads) for ranks in config.ranks]
    rows = [row for part in measured for row in part.rows]
    counts = [row for part in measured for row in part.counts]
    compared = [case for part in measured for case in part.compared]
    harness.append(config.out / "update.csv", rows)
    harness.append(config.out / "update-counts.csv", counts, CountRow)
    harness.show("update of a stored rollout", rows, baseline="baseline")
    lines = [
        {name.replace("_", " "): str(value) for name, value in asdict(row).items() if name != "torch"} for row in counts
    ]
    harness.show_table("counts of an update on one rank", lines, left=3)
    for case in compared:
        ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in case.speedup.items() if name != "baseline")
        mfu = "".join(f"; MFU of {name} {value:.2f}" for name, value in case.mfu.items())
        print(
            f"{case.size}, {case.ranks} process(es), {case.train}, {case.steps} steps: {ratios} of the baseline's speed; "
            f"gradients apart by {case.distance:.1g}{mfu}"
        )
    summary = summarize(counts, compared, config.counted)
    if config.json:
        print(json.dumps(summary))
    return summary


def summarize(
    counts: Sequence[CountRow], compared: Sequence[ComparedUpdates], counted: tuple[int, int, int]
) -> dict[str, dict[str, float] | float]:
    """Return the content of the line of JSON: counts with the most ranks, and the speed-up with the most ranks and steps.

    An FSDP unit is a block or the rest of the model; counts per block are means over units. Of LoRA and full fine-tuning
    the larger counts are taken. The speed-up is the smallest over both and over sizes.

    Args:
        counts, compared: rows of all numbers of ranks.
        counted: numbers of recorded steps that were counted: few, some and many. Collectives are those of "some".
    """
    ranks = max(row.ranks for row in counts)
    summary: dict[str, dict[str, float] | float] = {}
    for provider in COMPARED:
        few, some, many = (
            [row for row in counts if (row.provider, row.ranks, row.steps) == (provider, ranks, steps)] for steps in counted
        )
        if few:
            summary[provider] = {
                "micro_batches": some[0].micro_batches,
                "all_gather_per_block": max(row.all_gathers / row.units for row in some),
                "reduce_scatter_per_block": max(row.reduce_scatters / row.units for row in some),
                "host_reads_per_micro_batch": max(
                    (b.host_reads - a.host_reads) / (b.micro_batches - a.micro_batches)
                    for a, b in zip(few, some, strict=True)
                ),
                f"peak_bytes_{counted[0]}_steps": max(row.peak_bytes for row in few),
                f"peak_bytes_{counted[-1]}_steps": max(row.peak_bytes for row in many),
            }
    steps = max(case.steps for case in compared)
    headline = [case for case in compared if (case.steps, case.ranks) == (steps, ranks)]
    summary["speedup_vs_baseline"] = min(case.speedup["keep"] for case in headline)
    summary["speedup_vs_baseline_with_stored_log_probs"] = min(case.speedup_stored for case in headline)
    summary["gradient_distance"] = max(case.distance for case in compared)
    return summary
