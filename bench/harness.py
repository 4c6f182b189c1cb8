"""Measures in turn, and appends rows of (op, provider, mode, shape, ...) with spread, machine and versions to a CSV.

Machines are shared and noisy. Compare rows of one run by their ratios; an absolute time on a CPU means little.
"""

import csv
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fluvial.engines.errors import RunError

RESULTS = Path("bench/results")  # below the current folder


@dataclass(frozen=True)
class Row:
    """One measurement: seconds at the 20th, 50th and 80th percentile of `runs`, and the machine and versions."""

    op: str
    provider: str
    mode: str
    shape: str
    dtype: str
    runs: int
    p20: float
    p50: float
    p80: float
    rate: float  # `unit` per second at the median
    unit: str
    of_copy: float  # `rate` as a fraction of a copy of the same bytes; 0 if none was timed
    peak_bytes: int  # device memory of the process so far; 0 if the device does not count it
    device: str
    threads: int
    torch: str
    triton: str
    python: str
    date: str


def alternate(runs: int, work: Mapping[str, Callable[[], object]], *, warmup: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each run of some functions, timed in turn (A B A B), so that drift affects them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for run in range(warmup + runs):
        for name, function in work.items():
            _synchronize()
            start = time.perf_counter()
            function()
            _synchronize()
            if run >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def row(
    op: str,
    seconds: Sequence[float],
    *,
    provider: str,
    shape: str,
    amount: float,
    unit: str,
    mode: str = "",
    dtype: torch.dtype = torch.float32,
) -> Row:
    """Return the row of a list of timings.

    Args:
        op, provider, mode, shape, dtype: description of the measurement.
        seconds: time of each run.
        amount, unit: work per run, for the rate.
    """
    p20, p50, p80 = spread(torch.tensor(seconds, dtype=torch.float64))
    cuda = torch.cuda.is_available()
    return Row(
        op=op,
        provider=provider,
        mode=mode,
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        runs=len(seconds),
        p20=p20,
        p50=p50,
        p80=p80,
        rate=amount / p50,
        unit=unit,
        of_copy=0.0,
        peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        device=torch.cuda.get_device_name() if cuda else cpu(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        date=today(),
    )


def spread(values: torch.Tensor) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile of numbers in float64."""
    p20, p50, p80 = values.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return p20, p50, p80


def today() -> str:
    """Return the date of a row."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def write(path: Path, rows: Iterable[Any], kind: type) -> None:
    """Write the rows of a CSV, dataclasses of that kind; an interruption leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    whole.replace(path)


def append(path: Path, rows: Iterable[Any], kind: type = Row) -> None:
    """Append rows to a CSV, with a header if it is new.

    Args:
        rows: dataclasses of that kind.

    Raises:
        ValueError: the file has other columns.
    """
    names = [field.name for field in fields(kind)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or not path.read_text().strip()
    if not new and (found := path.read_text().splitlines()[0].split(",")) != names:
        raise ValueError(f"{path} has columns {found}, expected {names}: move it away")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        for measured in rows:
            writer.writerow({name: _short(value) for name, value in asdict(measured).items()})


def show(title: str, rows: Sequence[Row], *, baseline: str | None = None) -> None:
    """Print rows as a table; with a baseline (a provider), each op's ratio of medians to it."""
    columns = ["op", "provider", "mode", "shape", "p20 ms", "p50 ms", "p80 ms", "rate"]
    if baseline is not None:
        columns.append(f"speed against {baseline}")
    lines = []
    for r in rows:
        cells = [
            r.op,
            r.provider,
            r.mode,
            r.shape,
            *(f"{1e3 * p:.1f}" for p in (r.p20, r.p50, r.p80)),
            f"{r.rate:.4g} {r.unit}/s",
        ]
        if baseline is not None:
            of_baseline = [b.p50 for b in rows if (b.op, b.mode, b.shape, b.provider) == (r.op, r.mode, r.shape, baseline)]
            cells.append(f"{of_baseline[0] / r.p50:.2f}x" if of_baseline else "")
        lines.append(cells)
    show_table(title, columns, lines, left=columns[:4], width=140)


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str], width: int
) -> None:
    """Print cells as a table at least `width` characters wide; the columns named in `left` are aligned to the left."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for cells in rows:
        table.add_row(*cells)
    Console(width=max(Console().width, width)).print(table, highlight=False)


def in_processes(name: str, module: str, words: Sequence[str], *, ranks: int, threads: int) -> None:
    """Run a module in new processes, under torchrun; RunError if one fails.

    Args:
        name: name of the benchmark, for the message.
        module: module below `fluvial.bench`.
        words: its arguments.
        ranks: number of processes.
        threads: CPU threads of each.
    """
    launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", f"fluvial.bench.{module}", *words],
        # torchrun does not hand -P to the processes that it starts.
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"},
    )
    if done.returncode:
        raise RunError(f"{name}: {ranks} process(es) ended with exit code {done.returncode}; their messages are above")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _version(package: str) -> str:
    """Return a package's version, or "none" if it is not installed (triton exists for Linux only)."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cpu() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if (info.exists())
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
