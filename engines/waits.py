"""Messages about waits, so that no command is silent for longer than `PATIENCE` seconds."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self, TypeVar

Part = TypeVar("Part")
PATIENCE = 5.0  # seconds of a wait before its first line
LONGEST = 300.0  # longest time between two lines of one wait, in seconds
TICK = 0.5  # polling interval, in seconds


@dataclass(eq=False)
class PendingWait:
    """A wait in progress.

    Args:
        what: name of the wait, e.g. "rollout".
        total: number of parts; 0 if they are not counted.
        unit: unit of the parts, e.g. "samples".
        began: time at the start.
        done: number of finished parts.
    """

    what: str
    total: int
    unit: str
    began: float
    done: int = 0
    due: float = field(default=0.0, repr=False)

    def advance(self, parts: int = 1) -> None:
        """Count finished parts."""
        self.done = min(self.done + parts, self.total)

    def describe(self, now: float) -> str:
        """Describe the wait, its seconds, and the remaining seconds at the speed of the parts so far."""
        spent = now - self.began
        if not self.total:
            return f"{self.what}, {format_seconds(spent)}"
        line = f"{self.what} {self.done}/{self.total} {self.unit}".rstrip() + f", {format_seconds(spent)}"
        left = spent / self.done * (self.total - self.done) if self.done else 0.0
        return line + (f", {format_seconds(left)} left" if left else "")


class Waits:
    """Reporter of nested waits: a line after `PATIENCE` seconds, then at growing intervals.

    Args:
        say: function that prints a line.
        show: function that shows the innermost wait at every poll, e.g. in a bar; None shows nothing.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        show: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say, self.show, self.clock = say, show, clock
        self.stack, self.pauses = list[PendingWait](), dict[tuple[str, ...], float]()
        self._over, self._thread = Event(), Thread(target=self._report_until_over, name="waits", daemon=True)

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        CURRENT.reset(self._token)
        self._over.set()
        self._thread.join()

    @contextmanager
    def wait(self, what: str, total: int, unit: str) -> Iterator[PendingWait]:
        """Report the block as a wait."""
        now = self.clock()
        entered = PendingWait(what, total, unit, now)
        path = tuple(each.what for each in (*self.stack, entered))
        entered.due = now + self.pauses.get(path, PATIENCE)
        self.stack.append(entered)
        try:
            yield entered
        finally:
            self.stack.remove(entered)  # perhaps not the last: generators end when they are garbage-collected
            if not self.stack:
                self.pauses.clear()

    def report(self) -> None:
        """Show the innermost wait, and print a line if one is due."""
        now, stack = self.clock(), [*self.stack]
        if not stack:
            return
        if self.show is not None:
            self.show(stack[-1].describe(now))
        if not any(now >= each.due for each in stack):
            return
        names = tuple(each.what for each in stack)
        for depth, each in enumerate(stack, start=1):
            pause = min(2 * self.pauses.get(names[:depth], PATIENCE), LONGEST)
            self.pauses[names[:depth]], each.due = pause, now + pause
        self.say(": ".join([*(each.what for each in stack[:-1]), stack[-1].describe(now)]))

    def _report_until_over(self) -> None:
        while not self._over.wait(TICK):
            self.report()


CURRENT: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def wait_for(what: str, total: int = 0, unit: str = "") -> Iterator[PendingWait]:
    """Report the block as a wait, if a command or a run has opened `Waits`.

    Args:
        what: name of the wait, e.g. "rollout".
        total: number of parts, which `advance` counts.
        unit: unit of the parts.
    """
    waits = CURRENT.get()
    if waits is None:
        yield PendingWait(what, total, unit, 0.0)
        return
    with waits.wait(what, total, unit) as entered:
        yield entered


def count_parts(what: str, parts: Iterable[Part], size: int, total: int, unit: str = "samples") -> Iterator[Part]:
    """Yield parts inside a wait; each is counted when the next one is requested.

    Args:
        what, total, unit: see `wait_for`.
        size: count of each part.
    """
    with wait_for(what, total, unit) as wait:
        for part in parts:
            yield part
            wait.advance(size)


def format_seconds(seconds: float) -> str:
    """Format a duration: 12 s, 3 min 20 s, 5 h 10 min, 2 d 3 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            first, rest = divmod(whole, size)
            rest //= unit
            return f"{first} {large} {rest} {small}" if rest else f"{first} {large}"
    raise AssertionError(whole)
