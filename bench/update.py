"""The optimizer update of a stored rollout: fluvial's engine and the published way, counted and timed in one run.

The model is an SD3 transformer with random weights, the rollout its own. Both sides have the same weights, samples, sharding
(FSDP2, a unit a block), optimizer and gradient; `bench.baselines` says what the published way is. Both put as many
(sample, step) pairs through one forward and backward pass, so that they hold as many activations: the baseline a number of
samples at one step, the engine any pairs. `keep x4` is the engine with four times as many.

    python -P -m fluvial.bench update --json                                  the line of JSON, in some minutes
    python -P -m fluvial.bench update --ranks 1 2 --steps 2 4 10 --json       every row
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import optree
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.bench.baselines import PublishedLoop, Stored
from fluvial.bench.counting import Collectives, HostReads
from fluvial.bench.harness import Row
from fluvial.core.checks import check_number
from fluvial.core.random import fold_in, key, normal
from fluvial.core.rollout import Trajectory, rollout
from fluvial.core.transitions import flow_sde
from fluvial.engines.cli.main import exit_with
from fluvial.engines.errors import RunError
from fluvial.engines.fsdp import flops
from fluvial.engines.fsdp.engine import Engine, EngineConfig, OptimizerConfig, UpdateInfo
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.plan.memory import LiveStorages
from fluvial.engines.rollout import items
from fluvial.engines.rollout.items import Items
from fluvial.kernels import policy_loss
from fluvial.models import Cond, LoraConfig, add_lora
from fluvial.models.guidance import Guided, guided_velocity
from fluvial.models.handwriting import Handwriting
from fluvial.models.handwriting.model import CONFIG, CodeCond

# The adapter of SD3's transformer: its `velocity`, `blocks` and `schedule` do for every size.
MODEL = Handwriting(None)
ETA, CLIP, SCALE = 0.7, 0.01, 4.5
# No clip of the norm: the two sides' gradients are compared.
OPTIMIZER = OptimizerConfig(lr=1e-6, max_grad_norm=1e9)
CUDA = torch.cuda.is_available()
COMPARED = ("keep", "reshard", "baseline")  # the sides that the line of JSON tells of


@dataclass(frozen=True)
class Size:
    """A transformer and what goes into it.

    Args:
        settings: keyword arguments of diffusers' SD3Transformer2DModel.
        event: shape of one latent.
        tokens: of a prompt.
    """

    settings: Mapping[str, Any]
    event: tuple[int, ...]
    tokens: int

    def build(self, train: Literal["lora", "full"], device: torch.device) -> nn.Module:
        """Return the transformer with random weights, the same in every process; they are drawn on the device, for time."""
        from diffusers import SD3Transformer2DModel

        with torch.random.fork_rng(), device:
            torch.manual_seed(0)
            module = SD3Transformer2DModel(**self.settings)
        if train == "lora":
            add_lora(module, LoraConfig(), MODEL.lora_targets)
        return module


SD35 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
TINY = {
    **CONFIG, "sample_size": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 4,
    "caption_projection_dim": 8, "joint_attention_dim": 6, "pooled_projection_dim": 5, "pos_embed_max_size": 4,
}  # fmt: skip
SIZES = {
    "tiny": Size(TINY, (1, 4, 4), 2),  # for tests
    "small": Size(CONFIG, (1, 8, 32), 4),  # the handwriting model: 0.6 million parameters
    "medium": Size(  # 8 million
        {**CONFIG, "num_layers": 6, "attention_head_dim": 32, "num_attention_heads": 6, "caption_projection_dim": 192},
        (1, 8, 32),
        4,
    ),
    "sd3.5-medium 512^2": Size(SD35, (16, 64, 64), 333),  # 2.2 billion
    "sd3.5-medium 1024^2": Size(SD35, (16, 128, 128), 333),
}


@dataclass(frozen=True)
class UpdateConfig:
    """Count and time the update of a stored rollout beside the published way of making it.

    Args:
        sizes: of the model: tiny, small, medium, and for GPUs sd3.5-medium 512^2 and sd3.5-medium 1024^2.
        train: lora, full or both.
        steps: recorded steps of the updates that are timed.
        counted: recorded steps of the updates that are counted, of the first size, with the most processes: few, some and
            many. Each rank has one micro-batch of samples.
        ranks: world.
        samples: of each rank.
        micro_batch: (sample, step) pairs a forward and backward pass.
        guidance: classifier-free guidance in the update.
        checkpointing: keep each block's inputs alone for the backward pass, on both sides.
        runs: of each.
        threads: of each process on a CPU.
        json: print the counts and the speed-up as one line of JSON at the end.
        out: folder of update.csv and update-counts.csv, which rows are appended to.
    """

    sizes: tuple[str, ...] = ("sd3.5-medium 512^2", "sd3.5-medium 1024^2") if CUDA else ("small", "medium")
    train: tuple[Literal["lora", "full"], ...] = ("lora", "full")
    steps: tuple[int, ...] = (10,)
    counted: tuple[int, int, int] = (2, 10, 50)
    ranks: tuple[int, ...] = (1,) if torch.cuda.device_count() == 1 else (2,)
    samples: int = 8
    micro_batch: int = 4
    guidance: bool = True
    checkpointing: bool = CUDA
    runs: int = 5
    threads: int = 1
    json: bool = False
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        for name in ("samples", "micro_batch", "runs", "threads"):
            check_number("update", name, getattr(self, name), low=1)
        if self.samples % self.micro_batch:
            raise ValueError(f"update: micro_batch is {self.micro_batch}, expected a divisor of the {self.samples} samples")
        for name in ("steps", "counted", "ranks"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"update: {name} is {getattr(self, name)}, expected numbers of at least 1")
        if sorted(set(self.counted)) != list(self.counted):
            raise ValueError(f"update: counted is {self.counted}, expected rising numbers")
        if unknown := [size for size in self.sizes if size not in SIZES]:
            raise ValueError(f"update: sizes has {unknown[0]!r}, expected some of {', '.join(SIZES)}")


@dataclass(frozen=True)
class Case:
    """One rollout: what is updated, and in which micro-batches."""

    size: Size
    train: Literal["lora", "full"]
    steps: int
    guidance: bool
    samples: int
    micro_batch: int
    checkpointing: bool = False  # of each block's activations, on both sides


class Rollout(NamedTuple):
    """A rank's stored samples, as the engine and as the published way take them."""

    flat: Items
    cond: Cond  # `Guided` with guidance
    stored: Stored
    sigmas: Tensor  # [T + 1]
    timesteps: Tensor  # [T]


class Counts(NamedTuple):
    """What one update did on a rank."""

    all_gathers: int
    reduce_scatters: int
    other_collectives: int
    host_reads: int
    peak_bytes: int  # of activations, gradients and unsharded parameters: of all that was not there before


@dataclass(frozen=True)
class CountRow:
    """What one update of a provider did on a rank, with its case."""

    provider: str
    shape: str
    mode: str
    steps: int
    ranks: int
    units: int  # of communication: the blocks, and the rest of the model
    micro_batches: int
    all_gathers: int
    reduce_scatters: int
    other_collectives: int
    host_reads: int
    peak_bytes: int
    torch: str


@dataclass(frozen=True)
class Compared:
    """How fast each side was, as the median of ratios to the baseline's time in the same round."""

    size: str
    train: str
    steps: int
    ranks: int
    distance: float  # |g - g'| / |g'| of fluvial's gradient and the baseline's
    speedup: dict[str, float]
    speedup_stored: float  # of the engine, to the baseline that takes the rollout's log-probabilities
    mfu: dict[str, float]  # of the FLOPs that the engine's update needs; empty where the device's peak is not known


class Measured(NamedTuple):
    """What was measured with one number of world."""

    rows: list[Row]
    counts: list[CountRow]
    compared: list[Compared]


def make_rollout(engine: Engine, case: Case, world: World) -> Rollout:
    """Sample trajectories with the engine's policy and record every step."""
    device, size = world.device, case.size
    root = fold_in(key(1), world.rank)
    schedule = MODEL.schedule(case.steps)
    sigmas, timesteps = schedule.levels.to(device), schedule.timesteps.to(device)

    def draw(stream: int, *shape: int) -> Tensor:
        return normal(fold_in(root, stream), (case.samples, *shape), device=device)

    widths = size.settings["joint_attention_dim"], size.settings["pooled_projection_dim"]
    given, negative = (CodeCond(draw(stream, size.tokens, widths[0]), draw(stream + 1, widths[1])) for stream in (0, 2))
    scale = torch.full((case.samples,), SCALE, device=device)
    cond: Cond = Guided(given, negative, scale) if case.guidance else given
    sampler = partial(flow_sde, eta=ETA, sigma_max=sigmas[1])
    chunks = []
    with engine.inference() as module:
        for first in range(0, case.samples, case.micro_batch):
            part = optree.tree_map(lambda table, first=first: table[first : first + case.micro_batch], cond)

            def velocity(x: Tensor, sigma: Tensor, step: int, part: Cond = part) -> Tensor:
                return guided_velocity(MODEL, module, x, sigma, part, timestep=timesteps[step].expand(len(x))).float()

            x = draw(4, *size.event)[first : first + case.micro_batch]
            chunks.append(
                rollout(velocity, x, sigmas, transition=sampler, key=fold_in(root, 5 + first), record=range(case.steps))
            )
    trajectory: Trajectory = items.concatenate(chunks)
    advantage = draw(1000)
    stored = Stored(
        x=trajectory.x, x_next=trajectory.x_next, timesteps=timesteps.expand(case.samples, -1),
        log_prob=trajectory.log_prob, advantage=advantage,
        cond=given, uncond=negative if case.guidance else None, scale=SCALE,
    )  # fmt: skip
    flat = items.flatten(trajectory, schedule, advantage, torch.ones_like(advantage))
    return Rollout(flat, cond, stored, sigmas, timesteps)


def build_engine(case: Case, world: World, sharding: EngineConfig) -> Engine:
    """Return fluvial's engine over a fresh transformer."""
    module = case.size.build(case.train, world.device)
    if case.checkpointing:
        sharding = replace(sharding, checkpointing="block")
    return Engine(module, MODEL.blocks(module), OPTIMIZER, world, updates=1000, sharding=sharding)


def build_published(case: Case, world: World) -> PublishedLoop:
    """Return the published way over a fresh transformer."""
    dtype = EngineConfig().compute_dtype(world.device)
    module: Any = case.size.build(case.train, world.device)
    if case.checkpointing:
        module.enable_gradient_checkpointing()  # diffusers' own
    scheduler = MODEL.scheduler(case.steps)
    return PublishedLoop(MODEL, module, OPTIMIZER, world, scheduler=scheduler, eta=ETA, clip=CLIP, compute=dtype)


def update_engine(
    engine: Engine,
    rollout: Rollout,
    *,
    micro_batch: int,
    forwards: Literal["one", "two"] = "one",
    gradient: Literal["both", "conditional"] = "both",
) -> UpdateInfo:
    """Take the engine's optimizer step on a rollout."""
    sigmas = rollout.sigmas
    sampler = partial(flow_sde, eta=ETA, sigma_max=sigmas[1])

    def loss(batch: Items) -> Any:
        assert batch.level_next is not None
        assert batch.x_next is not None
        assert batch.log_prob_old is not None
        v = guided_velocity(
            MODEL, engine.module, batch.x, batch.level, optree.tree_map(lambda table: table[batch.sample], rollout.cond),
            timestep=batch.timestep, forwards=forwards, gradient=gradient,
        )  # fmt: skip
        return policy_loss(
            sampler(batch.level, batch.level_next), batch.x, v, batch.x_next, log_prob_old=batch.log_prob_old,
            advantage=batch.target_weight, clip_low=CLIP, clip_high=CLIP,
        )  # fmt: skip

    held = len(rollout.flat.level)
    return engine.update(
        rollout.flat, loss, rollout.flat.weight, count=held * engine.world.size, micro_batch=micro_batch, pad_to=held
    )


def counted(update: Callable[[], object], side: Engine | PublishedLoop, rollout: Rollout) -> Counts:
    """Count one update. What is there before is no part of the peak: parameters, optimizer state, the rollout."""
    state = [value for values in side.optimizer.state.values() for value in values.values()]
    there = [*side.module.parameters(), *side.module.buffers(), *state, *optree.tree_leaves(rollout)]
    memory = LiveStorages([leaf for leaf in there if isinstance(leaf, Tensor)])
    with Collectives() as collectives, HostReads() as reads, memory:
        update()
    return Counts(collectives.all_gathers, collectives.reduce_scatters, collectives.policies, reads.total, memory.peak)


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
    """One way of making the update."""

    trained: Engine | PublishedLoop
    update: Callable[[], object]
    passes: int  # forward and backward passes an update, of a rank


def build_sides(case: Case, world: World) -> tuple[dict[str, Side], Rollout, float]:
    """Return every way of making the update of one rollout, the rollout, and how far apart their gradients are.

    Each has made an update, so that its optimizer's state is there.
    """
    keep, published = build_engine(case, world, EngineConfig()), build_published(case, world)
    rollout, size, held = make_rollout(keep, case, world), case.micro_batch, case.samples * case.steps
    theirs = partial(published.update, rollout.stored, micro_batch=size)
    sides = {
        "keep": Side(keep, partial(update_engine, keep, rollout, micro_batch=size), -(-held // size)),
        "keep x4": Side(keep, partial(update_engine, keep, rollout, micro_batch=4 * size), -(-held // (4 * size))),
        "baseline": Side(published, theirs, held // size),
        "baseline, stored log-probs": Side(published, partial(theirs, recompute=False), held // size),
    }
    if not CUDA or world.size > 1:  # alone it is "keep" with more copies, and a third model of this size may not fit
        reshard = build_engine(case, world, EngineConfig(comm="reshard"))
        sides["reshard"] = Side(reshard, partial(update_engine, reshard, rollout, micro_batch=size), -(-held // size))
    for name in ("keep", "baseline", *(name for name in sides if name == "reshard")):
        sides[name].update()
    distance = max(gradient_distance(sides[name].trained, published, world) for name in sides if name in ("keep", "reshard"))
    return sides, rollout, distance


def count_case(case: Case, world: World, *, name: str, compared: Collection[str] = ()) -> list[CountRow]:
    """Count an update of each side, or of those that are compared."""
    sides, rollout, _ = build_sides(case, world)
    return [
        CountRow(
            provider, _shape(name, case), _mode(case, world), case.steps, world.size,
            len(MODEL.blocks(side.trained.module)) + 1, side.passes, *counted(side.update, side.trained, rollout),
            torch.__version__,
        )
        for provider, side in sides.items()
        if provider in compared or not compared
    ]  # fmt: skip


def time_case(case: Case, world: World, *, name: str, runs: int) -> tuple[list[Row], Compared]:
    """Time the sides in turn."""
    sides, _, distance = build_sides(case, world)
    peaks: dict[str, int] = {}
    seconds = harness.alternate(
        runs, {provider: partial(_together, side.update, provider, peaks) for provider, side in sides.items()}
    )
    rows = [
        replace(
            harness.row(
                "update", times, provider=provider, mode=_mode(case, world), shape=_shape(name, case),
                amount=case.samples * world.size, unit="samples", dtype=EngineConfig().compute_dtype(world.device),
            ),
            peak_bytes=peaks.get(provider, 0),
        )
        for provider, times in seconds.items()
    ]  # fmt: skip

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
    """Count and time every case with this number of world."""
    measured, p = Measured([], [], []), config.micro_batch
    for train in config.train:
        for steps in config.counted if world.size == max(config.ranks) else ():
            name = config.sizes[0]
            case = Case(
                SIZES[name], train, steps, config.guidance, samples=p, micro_batch=p, checkpointing=config.checkpointing
            )
            # Of many steps only what is compared, for time.
            compared = COMPARED if steps == config.counted[-1] else ()
            measured.counts.extend(count_case(case, world, name=name, compared=compared))
            gc.collect()  # hooks hold modules in circles
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


def run(config: UpdateConfig) -> dict[str, Any]:
    """Measure with each number of world, append to update.csv and update-counts.csv, print, and return the summary.

    Raises:
        RunError: the processes failed; what they said is on standard error.
    """
    measured = [_in_processes(config, ranks) for ranks in config.ranks]
    rows = [row for part in measured for row in part.rows]
    counts = [row for part in measured for row in part.counts]
    compared = [case for part in measured for case in part.compared]
    harness.append(config.out / "update.csv", rows)
    harness.append(config.out / "update-counts.csv", counts, CountRow)
    harness.show("update of a stored rollout", rows, baseline="baseline")
    _show_counts(counts)
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
    counts: Sequence[CountRow], compared: Sequence[Compared], counted: tuple[int, int, int]
) -> dict[str, dict[str, float] | float]:
    """Return what the line of JSON holds, of the most processes: counts of an update, and the speed-up at the most steps.

    A unit of communication is a block or the rest of the model; counts a block are the mean over units. Of LoRA and full
    fine-tuning the counts are the larger; the speed-up is the smallest over those and over sizes.

    Args:
        counts, compared: what was measured.
        counted: recorded steps of the updates that were counted: few, some and many. Collectives are those of some.
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


def _in_processes(config: UpdateConfig, ranks: int) -> Measured:
    """Measure in processes of their own, under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        told, out = Path(folder) / "config.json", Path(folder) / "measured.json"
        told.write_text(json.dumps({name: value for name, value in asdict(config).items() if name != "out"}))
        launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "fluvial.bench.update", str(told), str(out)],
            # The launcher takes no -P for the processes it starts.
            env={**os.environ, "OMP_NUM_THREADS": str(config.threads), "PYTHONSAFEPATH": "1"},
        )
        if done.returncode:
            raise RunError(f"update: {ranks} process(es) ended with exit code {done.returncode}; what they said is above")
        read = json.loads(out.read_text())
    return Measured(
        [Row(**row) for row in read["rows"]],
        [CountRow(**row) for row in read["counts"]],
        [Compared(**case) for case in read["compared"]],
    )


def worker(args: list[str]) -> int:
    """Measure as one of the processes: read the configuration, and write what was measured as JSON."""
    told = json.loads(Path(args[0]).read_text())
    fields_: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    config = UpdateConfig(**fields_)
    with init_world() as world:
        measured = measure(config, world)
        if world.is_main:
            Path(args[1]).write_text(json.dumps({k: [asdict(row) for row in v] for k, v in measured._asdict().items()}))
    return 0


def _together(update: Callable[[], object], provider: str, peaks: dict[str, int]) -> None:
    """Run an update, begun by all ranks at once; on a GPU note the memory that it takes beyond what was held."""
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


def _show_counts(rows: Sequence[CountRow]) -> None:
    columns = [field.name for field in fields(CountRow) if field.name != "torch"]
    table = Table(title="counts of an update, of a rank", title_justify="left")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name in ("provider", "shape", "mode") else "right")
    for row in rows:
        table.add_row(*(str(getattr(row, name)) for name in columns))
    Console(width=max(Console().width, 180)).print(table, highlight=False)


if __name__ == "__main__":
    exit_with(worker, sys.argv[1:])
