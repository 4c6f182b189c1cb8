"""Requests to stop: the update is finished and saved, and the exit code is 0. A second Ctrl-C stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the run was asked to stop, by Ctrl-C or by SIGTERM from a scheduler."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request to stop; after the first, SIGINT has its default effect.

    A repeated SIGTERM changes nothing: torchrun forwards the one that it receives, and a scheduler may send one to every
    process.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.name = request.name or signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
