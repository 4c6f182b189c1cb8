"""Launcher of a command's ranks on this machine; they stop together, with one exit code.

torchrun is for several machines. With it a rank gets Ctrl-C twice, from the terminal and from torchrun, and the second one
stops it at once. Here a request to stop reaches each rank once.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from fluvial.engines.run.process.stop import SIGNALS

STORE = "FLUVIAL_STORE_SOCKET"  # environment variable with the file descriptor of the socket that rank 0 listens on
GRACE = 30.0  # seconds for the other ranks to end by themselves after one has failed
POLL = 0.1  # polling interval of the ranks, in seconds


def launch(command: Sequence[str], processes: int) -> int:
    """Run a command as the ranks of one process group on this machine, and return its exit code.

    SIGINT and SIGTERM are forwarded to every rank. The exit code is 0 if all ranks exit with 0, else that of the rank that
    failed first: 130 after SIGINT, 1 after other signals. The ranks share the cores, unless OMP_NUM_THREADS is set.

    Args:
        command: program and arguments of every rank.
        processes: number of ranks.

    Raises:
        ValueError: processes is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, expected at least 1")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(count_cores() // processes, 1))
    size = str(processes)
    ranks = _Ranks()
    try:
        # Rank 0 gets the open socket, so no other program can take its port in between.
        with socket.create_server(("127.0.0.1", 0), backlog=processes) as listening:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
            shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": threads}
            for rank in range(processes):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.start(command, {**shared, **variables}, listening if rank == 0 else None)
        ranks.forward_signals()
        return ranks.wait()
    finally:
        ranks.close()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Ranks:
    """Processes of a command, with forwarding of requests to stop."""

    def __init__(self) -> None:
        self.processes = list[subprocess.Popen[bytes]]()
        self.waiting: list[int] | None = []  # signals received before all ranks were started
        self.before = {number: signal.signal(number, self._forward_signal) for number in SIGNALS}

    def start(self, command: Sequence[str], environment: dict[str, str], listening: socket.socket | None) -> None:
        """Start the next rank in a new process group, out of reach of the terminal's Ctrl-C."""
        sockets = () if listening is None else (listening.fileno(),)
        inherited = {} if listening is None else {STORE: str(listening.fileno())}
        self.processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **environment, **inherited},
                stdin=subprocess.DEVNULL,
                pass_fds=sockets,
                process_group=0,
                preexec_fn=end_with_parent,  # ranks stop also if SIGKILL ends this process
            )
        )

    def forward_signals(self) -> None:
        """Forward the signals received so far; later ones are forwarded at once."""
        arrived, self.waiting = self.waiting or [], None
        for number in arrived:
            self._forward_signal(number, None)

    def wait(self) -> int:
        """Wait for all ranks and return the exit code; once one has failed, the others have `GRACE` seconds to end."""
        code, deadline, running = 0, float("inf"), dict(enumerate(self.processes))
        while running:
            for rank, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[rank]
                if process.returncode and not code:
                    code, deadline = _find_exit_code(process.returncode), time.monotonic() + GRACE
                    if code == 1 and process.returncode < 0:
                        name = signal.Signals(-process.returncode).name
                        print(f"fluvial: rank {rank} of {len(self.processes)} was ended by {name}", file=sys.stderr)
            if time.monotonic() > deadline:
                for process in running.values():
                    process.kill()
            time.sleep(POLL if running else 0)
        return code

    def close(self) -> None:
        """Kill the ranks that still run, and restore the signal handlers."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        if self.waiting is not None:
            self.waiting.append(number)
            return
        for process in self.processes:
            process.send_signal(number)


def _find_exit_code(returncode: int) -> int:
    """Return the exit code for the return code of a rank."""
    return returncode if returncode > 0 else 130 if -returncode == signal.SIGINT else 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the system send this process a signal when its parent dies, also by kill -9; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
