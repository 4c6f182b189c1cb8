"""Requests to stop: the run finishes and saves its batch, and exits with 0. A second Ctrl-C stops it at once."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request to stop, by Ctrl-C or by SIGTERM from a scheduler; true once it was made."""

    def __init__(self) -> None:
        self.name: str | None = None  # name of the first signal
        self._calls = list[Callable[[], None]]()

    def __bool__(self) -> bool:
        return self.name is not None

    def call_on_stop(self, call: Callable[[], None]) -> None:
        """Register a function to call on another thread when a stop is requested, even while the main thread waits."""
        self._calls.append(call)

    def _watch(self, arrived: socket.socket) -> None:
        """Call the registered functions at the first signal, and end the process at the second SIGINT."""
        with arrived:
            first = True
            while numbers := arrived.recv(1):
                if first:
                    for call in self._calls:
                        call()
                elif numbers[0] == signal.SIGINT:
                    end_at_once(signal.SIGINT)
                first = False


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request to stop; after the first, SIGINT ends the process at once.

    A repeated SIGTERM has no effect, because torchrun forwards the one that it receives, and a scheduler may send one to
    every process.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.name = request.name or signal.Signals(number).name

    arrived, arriving = socket.socketpair()
    arriving.setblocking(False)
    # A thread receives signals at once; Python's handlers wait for the main thread, which may be in a collective.
    Thread(target=request._watch, args=(arrived,), name="signals", daemon=True).start()
    woken = signal.set_wakeup_fd(arriving.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        arriving.close()


def end_at_once(number: int) -> NoReturn:
    """End the process with one line and the exit code 128 + the signal's number."""
    say_stopped(number)
    os._exit(128 + number)


def say_stopped(number: int) -> None:
    """Print that a signal ended the command, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        line = f"fluvial: {signal.Signals(number).name}: stopped at once; everything saved so far is unchanged\n"
        os.write(2, line.encode())  # the main thread may hold the lock of sys.stderr


def _forget_wakeup() -> None:
    """Stop sending a forked process's signals to the thread of its parent."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)
