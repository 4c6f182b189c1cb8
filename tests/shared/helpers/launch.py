"""Starts processes for tests: the command line, or a function on a number of ranks, forked from a server that is warm."""

import atexit
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from helpers import forkserver, stored

forked: list[float] = []  # CPU seconds of each process that has ended, for the ledger
SHARED = Path(__file__).parents[1]
TIME = r"\d+ (s|min|h)( \d+ (s|min))?"
WAITS = re.compile(rf"fluvial: [^:,]+, {TIME}(, {TIME} left)?")  # how long something takes, said on a busy machine
# Eight samples of four steps per update: a fraction of a second each.
SMALL = [
    *("--sampling.prompts", "2", "--sampling.group", "4", "--sampling.steps", "4"),
    *("--sampling.window", "random", "--sampling.window.size", "2", "--sampling.window.high", "4"),
    *("--micro-batch", "4", "--checkpoint.every", "2"),
    *("--evaluation.every", "0", "--evaluation.samples", "8", "--final-samples", "8"),
    *("--optimizer.schedule", "constant"),  # a run whose last update can be moved
    *("--train", "full"),  # LoRA's import takes seconds; the tests that are about it ask for it
]


class Server:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", forkserver.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(helpers=True),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self.said,
                stderr=self.said,
            )
        self.text, self.number, self.reports = b"", 0, dict[int, dict[str, Any]]()
        atexit.register(self.close, os.getpid())

    def request(self, **request: Any) -> int:
        self.number += 1
        self.reports[self.number] = {}
        self.socket.sendall(json.dumps({**request, "number": self.number}).encode() + b"\n")
        return self.number

    def report(self, number: int, key: str, timeout: float) -> Any:
        """Return what the server says of a request, or None if it says nothing within `timeout` seconds."""
        until = time.monotonic() + timeout
        while key not in self.reports[number]:
            self.socket.settimeout(max(until - time.monotonic(), 1e-3))
            try:
                part = self.socket.recv(65536)
            except TimeoutError:
                return None
            assert part, "the fork server has ended: " + self._said()
            *lines, self.text = (self.text + part).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.reports.get(message.get("number"), {}).update(message)
        return self.reports[number][key]

    def _said(self) -> str:
        self.said.seek(0)
        return self.said.read()

    def close(self, pid: int) -> None:
        """End the server, unless this is a fork of the process that started it."""
        if os.getpid() == pid:
            self.socket.close()
            self.process.wait(30)
            self.said.close()


@cache
def server() -> Server:
    return Server()


class Process:
    """A forked program, with the methods of `subprocess.Popen` that tests use; its output goes to files."""

    def __init__(
        self, target: str, *arguments: Any, environment: dict[str, str], folder: Path | None = None, world: bool = False
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.files = {name: os.path.join(self.folder.name, name) for name in ("stdout", "stderr", "result")}
        self.returncode: int | None = None
        self.number = server().request(
            target=target,
            arguments=[str(argument) if isinstance(argument, Path) else argument for argument in arguments],
            environment=environment,
            folder=str(folder or os.getcwd()),
            world=world,
            timeout=120.0,
            **self.files,
        )
        self.pid: int = server().report(self.number, "pid", 300)  # the first also waits for the imports
        assert self.pid is not None, "the fork server does not answer"

    def address(self) -> str:
        until = time.monotonic() + 240
        while not (found := re.search(r"serving .* on (http://127\.0\.0\.1:\d+)\n", self.stdout)):
            assert self.poll() is None, self.stderr
            assert time.monotonic() < until, "the server does not listen"
            time.sleep(0.02)
        return found[1]

    def wait(self, timeout: float) -> int:
        """Return the exit code, negative for a signal, as `Popen` does.

        Raises:
            subprocess.TimeoutExpired: the program still runs.
        """
        if not self.ends(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired(self.files["stdout"], timeout, self.stdout, self.stderr)
        return self.returncode

    def ends(self, timeout: float) -> bool:
        if self.returncode is None:
            status = server().report(self.number, "status", timeout)
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
                forked.append(server().reports[self.number]["seconds"])
        return self.returncode is not None

    def poll(self) -> int | None:
        self.ends(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    def _text(self, name: str) -> str:
        path = Path(self.files[name])
        return path.read_text() if path.exists() else ""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait(30)
        self.folder.cleanup()


def start(*args: str, folder: Path | None = None, **variables: str) -> Process:
    return Process("fluvial.engines", *args, folder=folder, environment={**environment(), **variables})


def rewarded(*words: str) -> list[str]:
    return [*words] if "--rewards" in words else [*words, "--rewards", "jpeg"]


def fluvial(*args: str, ranks: int = 1, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end on a number of ranks; see `program`."""
    return program("fluvial.engines", *args, ranks=ranks, timeout=timeout)


def program(target: str, *args: str, ranks: int = 1, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a module, or `module:function` of the tests' workers, to its end on a number of ranks.

    Returns:
        The first exit code that is not 0, if any, and the output of all ranks, in their order.
    """
    with started(target, *args, ranks=ranks) as processes:
        codes = _finished(processes, timeout)
        out, err = ("".join(getattr(process, name) for process in processes) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([*args], next((code for code in codes if code), 0), out, err)


def train(out: Path, *args: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    done = fluvial("train", "handwriting", "--out", str(out), *SMALL, *args, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def trained(out: Path, *args: str, ranks: int = 1) -> Path:
    """Return `out` with the finished small run, which all tests with the same arguments share; each gets a copy."""
    key = hashlib.sha256(json.dumps([*args, ranks]).encode()).hexdigest()[:16]
    return stored.copy_of(f"trained-{key}", out, lambda folder: train(folder, *args, ranks=ranks))


def on_ranks(ranks: int, target: str, *arguments: Any, timeout: float = 240) -> list[Any]:
    """Call `module:function` of the tests' workers on a number of ranks, and return what it returns, by rank.

    The function takes the `World`, then the arguments. JSON must hold the arguments (paths become strings) and the values.

    Raises:
        AssertionError: a rank failed; its standard error is the message.
    """
    with started(target, *arguments, ranks=ranks, world=True) as processes:
        codes = _finished(processes, timeout)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        assert not failed, f"{target}: " + "\n".join(
            f"rank {rank} ended with code {codes[rank]}:\n{processes[rank].stderr}" for rank in failed
        )
        return [json.loads(Path(process.files["result"]).read_text()) for process in processes]


def call(target: str, *arguments: Any, timeout: float = 240) -> Any:
    """Call `module:function` of the tests' workers in a process that may fork and kill processes of its own.

    JSON must hold the arguments (paths become strings) and the value.

    Raises:
        AssertionError: it failed; its standard error is the message.
    """
    with started(target, *arguments, ranks=1) as (process,):
        (code,) = _finished([process], timeout)
        assert code == 0, f"{target} ended with code {code}:\n{process.stderr}"
        return json.loads(Path(process.files["result"]).read_text())


@contextlib.contextmanager
def started(target: str, *arguments: Any, ranks: int, world: bool = False) -> Iterator[list[Process]]:
    shared = {} if ranks == 1 else {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            own = {} if ranks == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            process = Process(target, *arguments, environment={**environment(), **shared, **own}, world=world)
            processes.append(stack.enter_context(process))
        yield processes


def _finished(processes: Sequence[Process], timeout: float) -> list[int]:
    """Wait for all ranks, and return their exit codes; where one fails, the others are killed as torchrun does."""
    until, patience = time.monotonic() + timeout, 10.0
    while any(process.poll() is None for process in processes):
        if any(process.returncode not in (0, None) for process in processes):
            until = min(until, time.monotonic() + patience)
        if time.monotonic() > until:
            for process in processes:
                process.kill()
            texts = "\n".join(process.stderr for process in processes)
            if all(process.returncode in (0, None) for process in processes):
                raise AssertionError(f"not finished within {timeout:g} s:\n{texts}")
            break
        next(process for process in processes if process.returncode is None).ends(0.1)
    return [process.wait(30) for process in processes]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(*, helpers: bool = False) -> dict[str, str]:
    """Return an environment in which one and several ranks use the same number of threads, and so the same kernels.

    Args:
        helpers: let a script that is run by its path import the helpers and the workers.
    """
    path = os.pathsep.join(filter(None, (str(SHARED), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"} if helpers else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **own}


def one_line(text: str) -> str:
    """Return the only line of an error, beside what is said on a busy machine."""
    lines = [line for line in text.splitlines() if line.strip() and not WAITS.fullmatch(line)]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def weights(out: Path) -> bytes:
    return (out / "weights" / "diffusion_pytorch_model.safetensors").read_bytes()


def records(out: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
