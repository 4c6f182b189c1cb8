"""Measurements on a GPU that is available for a short time: parts with time limits, whose rows are written at once.

    smoke        every fused kernel and its gradient beside float64
    train        whole `fluvial train handwriting` runs: float32, bfloat16 and compiled, beside one on the CPU
    tests        the tests of the kernels, on 12 workers
    kernels      the fused kernels at sizes of real models that no cache holds, beside a copy
    networks     updates and rollout steps of published networks with random weights: seconds, MFU, memory beside the plan
    update       FSDP2 updates of a transformer of SD3.5-medium's size, with LoRA and full, and the first ratio
    published    updates of that transformer beside the loop of published trainers (`bench.baselines`)
    compile      updates with compiled blocks: programs, recompilations, speed, and the first ratio
    invariance   whether a sample's prediction depends on its batch, which operation is the first, and what avoiding it costs
    nccl         the collectives of one rank

`bench/gpu/visit.sh` runs them in the order of two visits. Each part runs in a separate process, so that a failure or a hang
does not stop the others.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, Literal

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.bench import harness, kernels
from fluvial.bench.gpu import programs
from fluvial.bench.gpu.config import GpuConfig, GpuRow, Part, Rows
from fluvial.bench.traffic import Operations
from fluvial.bench.update.cases import MODEL, UpdateCase, build_engine, make_rollout, update_engine
from fluvial.bench.update.measure import time_case
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.world import init_world
from fluvial.engines.errors import RunError
from fluvial.models.handwriting.model import CodeCond

KERNEL_SHAPES = ("SD3.5 512^2", "Qwen-Image 1024^2", "Wan 480p 81 frames")


def run(config: GpuConfig) -> list[GpuRow]:
    """Run the parts; a part that fails or takes too long leaves a row with the reason."""
    ended = []
    for part in config.parts:
        note, began = "done", time.perf_counter()
        try:
            harness.run_in_processes(run_part, config, part, limit=config.find_limit(part))
        except RunError as error:
            note = str(error)
        rows = Rows(config, part)
        rows.add("part", "all", time.perf_counter() - began, "s", note)
        ended += rows.written
    return ended


def run_part(config: GpuConfig, part: Part) -> None:
    """Run one part, with a deadline before its time limit."""
    PARTS_BY_NAME[part](config, Rows(config, part), time.perf_counter() + 0.9 * config.find_limit(part))


def time_kernels(config: GpuConfig, rows: Rows, until: float) -> None:
    """Time the kernels at three sizes; their rows are in kernels.csv."""
    real = config.size == "real"
    timed = kernels.KernelsConfig(
        device=config.device,
        out=config.out,
        runs=20 if real else 2,
        batches=(64, 8) if real else (1,),  # 8 samples of SD3.5 at 512^2 are 25 MB, which the second-level cache holds
        shapes=KERNEL_SHAPES if real else ("handwriting",),
        operations=("policy_loss with KL", "nft_loss", "sde_step") if real else ("velocity_error",),
        compiled=False,
    )
    for operation in kernels.OPERATIONS:
        if operation.name in timed.operations:
            for row in kernels.measure(operation, timed, until=until):
                harness.append(config.out / "kernels.csv", [row])
                rows.add(f"{row.op}, {row.mode}", f"{row.provider}, {row.shape}", row.p50, "s")


def time_updates(config: GpuConfig, rows: Rows, until: float) -> None:
    """Time updates with LoRA and full, in two micro-batch sizes, one of them the rollout's."""
    for train in ("lora", "full"):
        if time.perf_counter() < until:
            _time_case_updates(config, rows, train, EngineConfig(compute="bfloat16", compile=False), until)


def time_compiled_updates(config: GpuConfig, rows: Rows, until: float) -> None:
    """Time updates with and without compiled blocks, and count the programs."""
    for compiles in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _time_case_updates(config, rows, "lora", EngineConfig(compute="bfloat16", compile=compiles), until)


def _time_case_updates(
    config: GpuConfig, rows: Rows, train: Literal["lora", "full"], sharding: EngineConfig, until: float
) -> None:
    """Time rollouts and their updates, and write the rows."""
    samples, setting = config.samples, f"{train}{', compiled' if sharding.compile else ''}"
    case = UpdateCase(config.model, train, 2, True, samples, samples, checkpointing=train == "full")
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with init_world() as world:
        engine = build_engine(case, world, sharding)
        before = _count_programs()
        for number, micro_batch in enumerate((samples, samples, samples // 2, samples // 2)):
            if number and time.perf_counter() > until:
                return
            began = harness.read_clock()
            rollout = make_rollout(engine, case, world)
            rolled = harness.read_clock()
            info = update_engine(engine, rollout, micro_batch=micro_batch)
            ended = harness.read_clock()
            named = f"{setting}, update {number + 1}, {micro_batch} items per pass"
            rows.add("rollout", named, rolled - began, "s")
            rows.add("update", named, ended - rolled, "s")
            rows.add("model FLOPs of an update", named, info.flops, "FLOP")
            rows.add("first |log ratio|, 0 where rollout and update agree", named, info.max_abs["log_ratio"], "nats")
            if sharding.compile:
                rows.add("compiled programs", named, _count_programs() - before, "programs")
                before = _count_programs()
        if config.device == "cuda":
            rows.add("peak memory", setting, torch.cuda.max_memory_allocated(), "bytes")


def compare_batch_sizes(config: GpuConfig, rows: Rows, until: float) -> None:
    """Compare predictions of samples in batches of several sizes, in bfloat16, and find the first operation that differs."""
    size, device, most = config.model, torch.device(config.device), config.samples
    module = size.build("full", device).to(torch.bfloat16).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(most, *shape, generator=generator, device=device, dtype=torch.bfloat16)

    widths = size.settings["joint_attention_dim"], size.settings["pooled_projection_dim"]
    x, cond, level = draw(*size.event), CodeCond(draw(size.tokens, widths[0]), draw(widths[1])), torch.full((most,), 0.5)
    level = level.to(device)

    @torch.no_grad()
    def predict(batch: int) -> Tensor:
        parts = [slice(first, first + batch) for first in range(0, most, batch)]
        return torch.cat([_predict(module, x[part], level[part], cond, part) for part in parts])

    for name, mode in MODES.items():
        with mode():
            whole, batch = predict(most), most
            while batch >= 1 and time.perf_counter() < until:
                predicted = predict(batch)
                equal = (predicted == whole).flatten(1).all(1).float().mean().item()
                rows.add("samples with the bits of the largest batch", f"{name}, {batch} per pass", equal, "fraction")
                distance = (predicted.float() - whole.float()).abs().max().item()
                rows.add("largest difference of a prediction", f"{name}, {batch} per pass", distance, "1")
                times = harness.alternate(3, {name: partial(predict, batch)}, warmup=0)[name]
                rows.add("seconds of all samples", f"{name}, {batch} per pass", median(times), "s")
                batch //= 2
            # One sample per pass is batch-invariant: its seconds above are the cost of such a mode.
            for small in dict.fromkeys((most // 2, 1)):
                place, operation = find_first_difference(
                    lambda count: _predict(module, x[:count], level[:count], cond, slice(0, count)), small=small, large=most
                )
                named = f"{name}, {small} and {most} per pass"
                rows.add("place of the first operation that depends on the batch", named, place, "of all", operation)


def _predict(module: nn.Module, x: Tensor, level: Tensor, cond: CodeCond, part: slice) -> Tensor:
    return MODEL.predict(module, x, level, optree.tree_map(lambda table: table[part], cond))


class _Products:
    """Matrix products without reductions in bfloat16, which split sums over the depth."""

    def __enter__(self) -> None:
        self.kept = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.kept


MODES: dict[str, Callable[[], Any]] = {
    "default": nullcontext,
    "full-precision reductions": _Products,
    "plain attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


@torch.no_grad()
def find_first_difference(predict: Callable[[int], Tensor], *, small: int, large: int) -> tuple[int, str]:
    """Return number and name of the first operation whose results for the first samples depend on the batch.

    Results of an operation have the samples along the first dimension. Views are left out. Returns (0, "none") if all agree.

    Args:
        predict: function from a number of samples to their prediction.
        small, large: numbers of samples to compare.
    """
    kept: list[tuple[str, list[Tensor]]] = []
    with Operations(lambda name, operands, results: kept.append((name, [t.clone() for t in results]))):
        predict(small)
    place, changes = 0, list[tuple[int, str]]()

    def compare(name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        nonlocal place
        place += 1
        if changes or place > len(kept):
            return
        known, expected = kept[place - 1]
        if known != name:
            changes.append((place, f"{known} became {name}"))
            return
        for mine, theirs in zip(results, expected, strict=True):
            per_sample = mine.ndim > 0 and mine.shape[1:] == theirs.shape[1:] and len(mine) * small == len(theirs) * large
            if per_sample and not torch.equal(mine[: len(theirs)], theirs):
                changes.append((place, f"{name} of {list(theirs.shape)}"))

    with Operations(compare):
        predict(large)
    return changes[0] if changes else (0, "none")


def compare_with_published(config: GpuConfig, rows: Rows, until: float) -> None:
    """Time updates in turn with the loop of published trainers on the same rollout."""
    case = UpdateCase(config.model, "lora", 4, True, config.samples, config.samples // 2)
    with init_world() as world:
        measured, compared = time_case(case, world, name=config.size, runs=3)
    for row in measured:
        rows.add("update", row.provider, row.p50, "s", f"of {row.p20:.4g} to {row.p80:.4g}")
    for provider, speedup in compared.speedup.items():
        rows.add("speed beside the published loop", provider, speedup, "1")
    rows.add("speed beside the published loop", "keep, its log-probs stored", compared.speedup_stored, "1")
    rows.add("distance of the gradients", "keep and published loop", compared.distance, "1")


def check_collectives(config: GpuConfig, rows: Rows, until: float) -> None:
    """Run the collectives of an update on one rank, and compare their results with the expected ones."""
    elements = 2**26 if config.size == "real" else 2**10
    with init_world() as world:
        backend = "nccl" if config.device == "cuda" else "gloo"
        source = torch.arange(elements, device=world.device, dtype=torch.float32)
        target = torch.empty_like(source)
        collectives: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(target.copy_(source)),
            "all_gather": lambda: dist.all_gather([target], source),
            "reduce_scatter": lambda: dist.reduce_scatter(target, [source]),
        }
        for name, collective in collectives.items():
            target.zero_()
            collective()
            rows.add(f"{name} gives the numbers of one rank", backend, float(torch.equal(target, source)), "1 or 0")
            times = harness.alternate(5, {name: collective}, warmup=0)[name]
            rows.add(name, f"{backend}, {4 * elements} bytes", median(times), "s")


def _count_programs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


PARTS_BY_NAME: dict[Part, Callable[[GpuConfig, Rows, float], None]] = {
    "smoke": programs.compare_kernels,
    "train": programs.train,
    "tests": programs.run_kernel_tests,
    "networks": programs.time_networks,
    "published": compare_with_published,
    "kernels": time_kernels,
    "update": time_updates,
    "compile": time_compiled_updates,
    "invariance": compare_batch_sizes,
    "nccl": check_collectives,
}
