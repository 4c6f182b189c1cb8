"""Time to a training command's first line, image and update: seconds, and CPU seconds of its processes."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class WaitsConfig:
    """Measure the time to the first line, image and update of a training command.

    Args:
        command: Arguments of `fluvial`, without the folder of the run.
        tree: Folder with the package `fluvial` of another commit; None is the installed one.
        runs: Number of runs, one after the other.
        limit: Time limit of a run, in seconds.
    """

    command: str = "train ddpo --processes auto"
    tree: Path | None = None
    runs: int = 3
    limit: float = 600.0


def run(config: WaitsConfig) -> None:
    """Print median, minimum and maximum of the times; a run ends at its first update."""
    waits = [_measure_waits(config) for _ in range(config.runs)]
    for name in waits[0]:
        seconds, cpu = ([each[name][i] for each in waits if name in each] for i in (0, 1))
        spread = (
            f"({min(seconds):.1f} to {max(seconds):.1f}) s, {median(cpu):.1f} ({min(cpu):.1f} to {max(cpu):.1f}) s of CPU"
        )
        print(f"first {name:8} {median(seconds):6.1f} {spread}")
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def _measure_waits(config: WaitsConfig) -> dict[str, tuple[float, float]]:
    """Run the command, and return the seconds and CPU seconds until each event."""
    with TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        words = [sys.executable, "-P", "-m", "fluvial.engines", *shlex.split(config.command), "--out", str(out)]
        paths = {} if config.tree is None else {"PYTHONPATH": str(config.tree)}
        began, seen = time.monotonic(), dict[str, tuple[float, float]]()
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **paths}, start_new_session=True)
        metrics = out / "metrics.jsonl"
        events: dict[str, Callable[[], bool]] = {
            "line": lambda: log.stat().st_size > 0,
            "image": lambda: any(out.rglob("*.png")),
            "update": lambda: metrics.exists() and '"grad_norm"' in metrics.read_text(encoding="utf-8"),
        }
        while len(seen) < len(events) and process.poll() is None and time.monotonic() - began < config.limit:
            time.sleep(0.1)
            now = [name for name, happened in events.items() if name not in seen and happened()]
            seen |= dict.fromkeys(now, (time.monotonic() - began, _read_cpu_seconds(process.pid)))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        elif len(seen) < len(events):
            last = log.read_text(encoding="utf-8").splitlines()[-1:]
            raise UsageError(f"fluvial {config.command} ended before its first update: {' '.join(last)}")
        process.wait()
    return seen


def _read_cpu_seconds(session: int) -> float:
    """Read the user and system CPU seconds of a session's processes and of their waited-for children."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()  # from the third field on, see proc(5)
        except OSError:  # the process has ended
            continue
        ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")
