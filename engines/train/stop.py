"""Stopping on request: finish the update, save, exit 0. A second Ctrl-C stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a person (Ctrl-C) or the machine's keeper (SIGTERM) has asked the run to stop."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Note SIGINT and SIGTERM instead of acting on them; after the first, SIGINT acts as it does by default.

    A repeated SIGTERM says nothing new: torchrun hands on the one that it gets, and a scheduler may send one to all.
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
