"""Requests to stop: the update is finished and saved, and the exit code is 0. A second Ctrl-C stops at once."""

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
    """Whether the run was asked to stop, by Ctrl-C or by SIGTERM from a scheduler."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal
        self._then = list[Callable[[], None]]()

    def __bool__(self) -> bool:
        return self.name is not None

    def then(self, call: Callable[[], None]) -> None:
        """Call a function on another thread once the run is asked to stop, also while the main thread waits."""
        self._then.append(call)

    def _watch(self, arrived: socket.socket) -> None:
        """Call what waits for a request, and end the process at the second SIGINT, whatever the main thread does."""
        with arrived:
            first = True
            while numbers := arrived.recv(1):
                if first:
                    for call in self._then:
                        call()
                elif numbers[0] == signal.SIGINT:
                    end_at_once(signal.SIGINT)
                first = False


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request to stop; after the first, SIGINT ends the process at once.

    A repeated SIGTERM changes nothing: torchrun forwards the one that it receives, and a scheduler may send one to every
    process.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.name = request.name or signal.Signals(number).name

    arrived, arriving = socket.socketpair()
    arriving.setblocking(False)
    # A thread sees a signal at once; Python's handlers wait for the main thread, which may be in a collective.
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
    """End the process with one line and the exit code of a signal, 128 + its number."""
    say_stopped(number)
    os._exit(128 + number)


def say_stopped(number: int) -> None:
    """Print that a signal ended the command, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        line = f"fluvial: {signal.Signals(number).name}: stopped at once; everything saved so far is unchanged\n"
        os.write(2, line.encode())  # the main thread may hold the lock of sys.stderr


def _forget_wakeup() -> None:
    """Keep the signals of a forked process from the thread of its parent."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)
