"""Times of the hot path of a step: reference, torch.compile and fused kernels, beside a copy of the same bytes.

On a CPU there is no fused kernel: eager, compiled and a loop over samples are timed, which means little for a GPU. On a GPU
times are measured by the device, with its cache cleared before every run.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from fluvial.bench import harness
from fluvial.bench.harness import Measurement
from fluvial.bench.operations import OPERATIONS, SHAPES, Operation, count_bytes, make_inputs
from fluvial.core.checks import check_choice, check_number
from fluvial.kernels.fused.rows import launches

MODES = ("forward", "backward", "both")


@dataclass(frozen=True)
class KernelsConfig:
    """Time the hot path of a step at the sizes of real models.

    Args:
        device: cpu or cuda; cuda (ROCm too) if there is one.
        batches: samples per call.
        shapes: names of latent shapes, all by default (on a CPU the small ones).
        operations: names of operations; by default all on a CPU, and on a GPU a selection that takes less than 8 minutes,
            most of it in torch.compile.
        compiled: also time torch.compile of the reference, which takes most of the time.
        runs: number of timed runs.
        seconds: time limit; no further size starts after it, and the rows so far are kept.
        max_bytes: largest number of bytes of a forward pass; larger sizes are left out.
        out: folder of kernels.csv and the plots.
    """

    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    batches: tuple[int, ...] = (1, 8, 64) if torch.cuda.is_available() else (1, 8)
    shapes: tuple[str, ...] = tuple(SHAPES)[1:] if torch.cuda.is_available() else ("handwriting", "SD3.5 512^2")
    operations: tuple[str, ...] = (
        ("step_log_prob with KL", "policy_loss with KL", "nft_loss", "sde_step")
        if torch.cuda.is_available()
        else tuple(operation.name for operation in OPERATIONS)
    )
    compiled: bool = True
    runs: int = 20
    seconds: float = 420.0
    max_bytes: int = 2**33
    out: Path = harness.RESULTS

    def __post_init__(self) -> None:
        check_number("kernels", "runs", self.runs, low=1)
        check_number("kernels", "seconds", self.seconds, low=0)
        for shape in self.shapes:
            check_choice("kernels", "shapes", shape, SHAPES)
        for name in self.operations:
            check_choice("kernels", "operations", name, [operation.name for operation in OPERATIONS])
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("kernels: device is cuda, and there is none here: use cpu")


def run(config: KernelsConfig) -> list[Measurement]:
    """Measure, append to kernels.csv, plot and print a table."""
    # Backward runs through a graph more than once. Each shape is compiled separately, because a run has only one.
    with functorch_config.patch(donated_buffer=False), dynamo_config.patch(automatic_dynamic_shapes=False):
        began, rows = time.perf_counter(), list[Measurement]()
        for operation in OPERATIONS:
            if operation.name in config.operations:
                measured = list(measure(operation, config, until=began + config.seconds))
                harness.append(config.out / "kernels.csv", measured)
                rows += measured
    harness.show(f"hot path of a step on {rows[0].device}", rows, baseline="reference")
    if config.device != "cpu":
        print(f"fused, from 64 MiB up: at least {find_fraction_of_copy(rows, 'triton'):.2f} of a copy's bandwidth")
    plot(rows, config.out)
    return rows


def measure(operation: Operation, config: KernelsConfig, *, until: float = math.inf) -> Iterator[Measurement]:
    """Yield the rows of an operation for every shape, batch, mode and provider, until the deadline."""
    for shape in config.shapes:
        for batch in config.batches:
            moved = count_bytes(operation, batch, SHAPES[shape], dtype=torch.bfloat16)
            if moved["forward"] > config.max_bytes:
                continue
            if time.perf_counter() > until:
                print(f"out of time: {operation.name} at {batch} x {shape} and on is left out (--seconds)", flush=True)
                return
            torch._dynamo.reset()
            for mode in MODES if operation.gradients else MODES[:1]:
                yield from _measure_rows(operation, shape, batch, mode, moved[mode], config)


def _measure_rows(
    operation: Operation, shape: str, batch: int, mode: str, moved: int, config: KernelsConfig
) -> Iterator[Measurement]:
    samples, numbers = make_inputs(operation, batch, SHAPES[shape], dtype=torch.bfloat16, device=config.device)
    work = {name: _make_work(operation, name, mode, samples, numbers) for name in _list_providers(mode, config)}
    # Half of a copy's bytes are read and half are written.
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=config.device)
    target = torch.empty_like(source)
    work["copy"] = lambda: target.copy_(source)
    rows = {
        name: harness.make_row(
            operation.name,
            times,
            provider=name,
            mode=mode,
            shape=f"{batch} x {shape}",
            amount=0.0 if name == "empty launch" else moved / 1e9,
            unit="GB",
            dtype=torch.bfloat16,
        )
        for name, times in _time_work(work, config).items()
    }
    for name, row in rows.items():
        yield replace(row, of_copy=row.rate / rows["copy"].rate, peak_bytes=_measure_peak(work[name], config.device))


def _list_providers(mode: str, config: KernelsConfig) -> tuple[str, ...]:
    compiled = ("compiled",) if config.compiled else ()
    if config.device == "cpu":
        return ("reference", *compiled, "loop")
    one = ("triton, one launch",) if mode == "forward" else ()
    return ("reference", *compiled, "triton", *one, "empty launch")


def _make_work(
    operation: Operation, provider: str, mode: str, samples: dict[str, Tensor], numbers: dict[str, Tensor]
) -> Callable[[], object]:
    """Return a function for one run of a provider."""
    if provider == "empty launch":
        pointer = next(iter(samples.values()))
        return lambda: _nothing[(1,)](pointer)
    differentiated = [samples[name].requires_grad_(mode != "forward") for name in operation.gradients]

    def forward() -> Tensor:
        if provider == "triton, one launch":
            with launches(1):
                return operation.call("triton", samples, numbers)
        if provider != "loop":
            return operation.call(provider, samples, numbers)
        alone = [
            operation.call(
                "reference", {n: t[i : i + 1] for n, t in samples.items()}, {n: t[i : i + 1] for n, t in numbers.items()}
            )
            for i in range(len(numbers["a"]))
        ]
        return torch.cat(alone)

    if mode == "forward":
        return torch.no_grad()(forward)
    if mode == "both":
        return lambda: torch.autograd.grad(forward().sum(), differentiated)
    result = forward()
    weight = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, differentiated, weight, retain_graph=True)


@triton.jit
def _nothing(ptr):  # type: ignore[no-untyped-def]
    pass


def _time_work(work: dict[str, Callable[[], object]], config: KernelsConfig) -> dict[str, list[float]]:
    if config.device == "cpu":
        return harness.alternate(config.runs, work, warmup=2)
    return {name: _time_on_device(function, config.runs) for name, function in work.items()}


def _time_on_device(function: Callable[[], object], runs: int) -> list[float]:
    """Time runs on the device; its cache is cleared before each, and it is busy until the host has queued the run."""
    for _ in range(3):
        function()
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        cache.zero_()
        torch.cuda._sleep(5_000_000)  # cycles, some milliseconds
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in events]


def _measure_peak(function: Callable[[], object], device: str) -> int:
    """Return the peak memory of a run beyond that before it; 0 if the device does not count memory."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def plot(rows: Sequence[Measurement], out: Path) -> list[Path]:
    """Plot bandwidth and time against size, one image per pass of an operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    device = "gpu" if any(row.provider == "triton" for row in rows) else "cpu"
    copies = {(row.op, row.mode, row.shape): 1e9 * row.rate * row.p50 for row in rows if row.provider == "copy"}

    def size(row: Measurement) -> float:
        return copies[row.op, row.mode, row.shape]

    paths = []
    for quantity, label in (("rate", "GB/s"), ("p50", "seconds")):
        modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
        operations = list(dict.fromkeys(row.op for row in rows))
        figure, axes = pyplot.subplots(
            len(operations), len(modes), figsize=(4.2 * len(modes), 2.8 * len(operations)), squeeze=False
        )
        for line, op in zip(axes, operations, strict=True):
            for axis, mode in zip(line, modes, strict=True):
                for provider in dict.fromkeys(row.provider for row in rows):
                    these: list[Any] = [r for r in rows if (r.op, r.mode, r.provider) == (op, mode, provider)]
                    points = sorted((size(row), getattr(row, quantity)) for row in these if getattr(row, quantity) > 0)
                    if points:
                        axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=provider)
                axis.set_title(f"{op}, {mode}", fontsize=8)
                axis.set_xlabel("bytes that must move", fontsize=7)
                axis.set_ylabel(label, fontsize=7)
                axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=6)
        figure.tight_layout()
        out.mkdir(parents=True, exist_ok=True)
        paths.append(out / f"kernels-{device}-{'bandwidth' if quantity == 'rate' else 'time'}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def find_fraction_of_copy(rows: Sequence[Measurement], provider: str) -> float:
    """Return a provider's smallest fraction of a copy's bandwidth from 64 MiB up; NaN without such a row."""
    large = [row.of_copy for row in rows if row.provider == provider and 1e9 * row.rate * row.p50 >= 2**26]
    return min(large, default=math.nan)
