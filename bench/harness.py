"""Alternating measurements, and CSV rows of (op, provider, mode, shape, ...) with spread, machine and versions.

Machines are shared and noisy. Compare rows of one run by their ratios; an absolute time on a CPU means little.
"""

import csv
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

from fluvial.engines.cli.main import exit_with
from fluvial.engines.errors import RunError
from fluvial.models.device import read_cpu_name

RESULTS = Path("bench/results")  # below the current folder
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
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
    """Time functions in turn (A B A B), so that drift affects all alike; return the seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for run in range(warmup + runs):
        for name, function in work.items():
            start = read_clock()
            function()
            if run >= warmup:
                seconds[name].append(read_clock() - start)
    return seconds


def read_clock() -> float:
    """Return the time in seconds, after all queued work of a GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def collect_facts(kind: type) -> dict[str, Any]:
    """Return machine, versions and date for the fields that a class of rows has for them."""
    cuda = torch.cuda.is_available()
    known: dict[str, Callable[[], object]] = {
        "device": torch.cuda.get_device_name if cuda else read_cpu_name,
        "threads": torch.get_num_threads,
        "torch": lambda: torch.__version__,
        "python": platform.python_version,
        "date": lambda: datetime.now(UTC).strftime("%Y-%m-%d"),
        **{name: partial(_find_version, name) for name in ("triton", "diffusers", "peft", "accelerate")},
    }
    return {field.name: known[field.name]() for field in fields(kind) if field.name in known}


def make_row(
    op: str,
    seconds: Sequence[float],
    *,
    provider: str,
    shape: str,
    amount: float,
    unit: str,
    mode: str = "",
    dtype: torch.dtype = torch.float32,
) -> Measurement:
    """Make the row of a list of timings.

    Args:
        op, provider, mode, shape, dtype: description of the measurement.
        seconds: time of each run.
        amount, unit: work per run, for the rate.
    """
    p20, p50, p80 = compute_spread(torch.tensor(seconds, dtype=torch.float64))
    return Measurement(
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
        peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        **collect_facts(Measurement),
    )


def compute_spread(values: torch.Tensor) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile of numbers in float64."""
    p20, p50, p80 = values.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return p20, p50, p80


def read(path: Path, kind: type[T]) -> list[T]:
    """Read the rows of a CSV; empty without the file. An empty cell is 0, and a missing column has its default."""
    if not path.exists():
        return []
    types = get_type_hints(kind)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{name: types[name](text) if text else types[name]() for name, text in record.items()})
            for record in csv.DictReader(file)
        ]


def write(path: Path, rows: Iterable[Any], kind: type) -> None:
    """Write dataclasses of a kind as the rows of a CSV, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    with whole.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    whole.replace(path)


def append(path: Path, rows: Iterable[Any], kind: type = Measurement) -> None:
    """Append rows to a CSV, with a header if the file is new.

    Args:
        rows: dataclasses of `kind`.

    Raises:
        ValueError: the file has other columns.
    """
    names = [field.name for field in fields(kind)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or not path.read_text(encoding="utf-8").strip()
    if not new and (columns := path.read_text(encoding="utf-8").splitlines()[0].split(",")) != names:
        raise ValueError(f"{path} has columns {columns}, expected {names}: move it away")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        for measured in rows:
            writer.writerow({name: _shorten(value) for name, value in asdict(measured).items()})


def show(title: str, rows: Sequence[Measurement], *, baseline: str | None = None) -> None:
    """Print rows as a table; with a baseline provider, also the ratio of medians to it."""
    lines = []
    for r in rows:
        line = {"op": r.op, "provider": r.provider, "mode": r.mode, "shape": r.shape}
        line |= {f"{name} ms": f"{1e3 * getattr(r, name):.1f}" for name in ("p20", "p50", "p80")}
        line["rate"] = f"{r.rate:.4g} {r.unit}/s"
        if baseline is not None:
            of_baseline = [b.p50 for b in rows if (b.op, b.mode, b.shape, b.provider) == (r.op, r.mode, r.shape, baseline)]
            line[f"speed against {baseline}"] = f"{of_baseline[0] / r.p50:.2f}x" if of_baseline else ""
        lines.append(line)
    show_table(title, lines, left=4)


def show_table(title: str, lines: Sequence[Mapping[str, str]], *, left: int) -> None:
    """Print lines of named cells as a table; the first `left` columns are aligned to the left."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(lines[0] if lines else ()):
        table.add_column(name, justify="left" if number < left else "right")
    for line in lines:
        table.add_row(*line.values())
    Console(width=max(Console().width, 180)).print(table, highlight=False)


def format_markdown(lines: Sequence[Mapping[str, str]]) -> str:
    """Format lines of named cells as a Markdown table."""
    columns = list(lines[0]) if lines else []
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (columns, *(line.values() for line in lines)))
    return "\n".join([head, "|" + "---|" * len(columns), *rows])


def run_in_processes(
    function: Callable[..., T], *arguments: Any, ranks: int = 1, threads: int | None = None, limit: float | None = None
) -> T:
    """Call a function in new processes, and return the result of rank 0.

    Args:
        function, arguments: the call, which is pickled.
        ranks: number of processes; several run under torchrun.
        threads: CPU threads per process; by default torch's choice.
        limit: time limit in seconds.

    Raises:
        RunError: a process failed (with the last line of its error), or took too long.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    # torchrun does not pass -P to its processes.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1"} | (
        {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    )
    with TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-P", *launcher, "-m", "fluvial.bench.harness", str(call)]
        errors = Path(folder, "errors")
        with errors.open("w", encoding="utf-8") as file:
            done = subprocess.Popen(command, env=environment, stderr=None if ranks > 1 else file, start_new_session=True)
            try:
                code = done.wait(limit)
            except subprocess.TimeoutExpired:
                raise RunError(f"stopped after {limit:.0f} s") from None
            finally:
                for number in (signal.SIGABRT, signal.SIGKILL):  # for descendants too; the first prints their tracebacks
                    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(done.pid, number)
                        done.wait(5)
                sys.stderr.write(messages := errors.read_text(encoding="utf-8", errors="replace"))
        if code and ranks > 1:
            raise RunError(f"{ranks} processes ended with exit code {code}; their messages are above")
        if code:
            lines = [line for line in messages.splitlines() if line.strip()]
            raise RunError(f"failed with code {code}: {lines[-1][:300] if lines else 'no message'}")
        result: T = pickle.loads(call.with_suffix(".result").read_bytes())
        return result


def _make_call(args: list[str]) -> int:
    """Run the call of `run_in_processes` in one of its processes."""
    call = Path(args[0])
    function, arguments = pickle.loads(call.read_bytes())
    result = function(*arguments)
    if os.environ.get("RANK", "0") == "0":
        call.with_suffix(".result").write_bytes(pickle.dumps(result))
    return 0


def _find_version(package: str) -> str:
    """Return a package's version, or "none" if it is not installed (triton exists for Linux only)."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _shorten(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    exit_with(_make_call, sys.argv[1:])
