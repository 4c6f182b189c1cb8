"""Functions and command lines in forked processes with limits of memory and time, so that a failure ends only its own."""

import contextlib
import importlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fluvial.engines.run.process.launch import STORE, end_with_parent

MOST_BYTES = 6 * 2**30  # memory that a process may take beyond what it is forked with
SECONDS = 300.0
POLL = 0.02


class ProcessResult(NamedTuple):
    """The exit code and the output of one or more processes."""

    code: int  # 0, or that of the first process that failed
    output: str  # what all of them have printed

    @property
    def last(self) -> str:
        """The last line of the output."""
        return self.output.strip().rpartition("\n")[2]


class Forked:
    """A function in a forked process that prints to a file and exits with the function's return value.

    The process ends with its parent. The parent must not have computed anything with torch before, because torch's threads
    do not survive a fork.

    Args:
        function: called without arguments; an exception is printed, and the exit code is then 1.
        output: file that the process prints to.
        environment: further environment variables.
    """

    def __init__(self, function: Callable[[], int | None], output: Path, environment: dict[str, str] | None = None) -> None:
        self.output, self.imported = output, output.with_suffix(".imported")
        before = set(sys.modules)
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setpgid(0, 0)
            end_with_parent(signal.SIGKILL)
            os.environ.update(environment or {})
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
            limit_memory()
            code = function() or 0
        except BaseException as error:  # of diffusers and transformers
            traceback.print_exc()
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        finally:
            with contextlib.suppress(BaseException):
                _flush()
                self.imported.write_text("\n".join(name for name in [*sys.modules] if name not in before), encoding="utf-8")
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self) -> None:
        """End the process and its children."""
        for end in (os.killpg, os.kill):  # it may not have a group of its own yet
            with contextlib.suppress(ProcessLookupError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def share_imports(self) -> None:
        """Import here the modules that the process imported, which saves the next process half of its time."""
        for name in self.imported.read_text(encoding="utf-8").split() if self.imported.exists() else ():
            with contextlib.suppress(Exception):  # a module that only the process could make
                importlib.import_module(name)

    def read_output(self) -> str:
        """Return what the process has printed so far."""
        return self.output.read_text(errors="replace", encoding="utf-8") if self.output.exists() else ""


def limit_memory() -> None:
    """Limit this process to `MOST_BYTES` of memory beyond its present use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])  # of data and stack
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def wait(processes: list[Forked], seconds: float = SECONDS) -> ProcessResult:
    """Wait until all processes have ended; kill the rest when one fails, or when `seconds` have passed."""
    running, code, until = dict(enumerate(processes)), 0, time.monotonic() + seconds
    while running and not code:
        for number, process in list(running.items()):
            if (ended := process.poll()) is not None:
                del running[number]
                code = code or ended
        if time.monotonic() > until:
            code = code or -signal.SIGALRM
        time.sleep(POLL)
    for process in running.values():
        process.kill()
    for process in processes:
        process.share_imports()
    output = "\n".join(process.read_output() for process in processes)
    reasons = {-signal.SIGALRM: f"it takes more than {seconds:g} seconds", -signal.SIGKILL: "it takes too much memory"}
    return ProcessResult(code, f"{output}\n{reasons[code]}" if code in reasons else output)


def run_ranks(function: Callable[[], int | None], folder: Path, count: int) -> ProcessResult:
    """Run a function as the ranks of one process group, and wait for them; see `Forked`."""
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listening:
        port, size = str(listening.getsockname()[1]), str(count)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        variables = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        variables[0] |= {STORE: str(listening.fileno())}
        return wait([Forked(function, folder / f"rank{rank}", {**shared, **variables[rank]}) for rank in range(count)])


@contextlib.contextmanager
def open_process(function: Callable[[], int | None], output: Path) -> Iterator[Forked]:
    """Run a function in a process that is killed at the end of the block."""
    process = Forked(function, output)
    try:
        yield process
    finally:
        process.kill()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
