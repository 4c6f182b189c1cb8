"""What a process waits for, said while it waits: no command is silent for longer than `PATIENCE` seconds."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self, TypeVar

Part = TypeVar("Part")
PATIENCE = 5.0  # seconds of a wait before it is said
LONGEST = 300.0  # seconds between two lines of one wait
TICK = 0.5  # seconds between two looks


@dataclass(eq=False)
class PendingWait:
    """Something that is waited for.

    Args:
        what: what it is, e.g. "rollout".
        total: number of its parts, 0 where they are not counted.
        unit: what the parts are, e.g. "samples".
        began: time of its begin.
        done: number of parts that are done.
    """

    what: str
    total: int
    unit: str
    began: float
    done: int = 0
    due: float = field(default=0.0, repr=False)

    def advance(self, parts: int = 1) -> None:
        """Count parts that are done."""
        self.done = min(self.done + parts, self.total)

    def describe(self, now: float) -> str:
        """Return the wait, its seconds, and those that are left at the speed of the parts so far."""
        spent = now - self.began
        if not self.total:
            return f"{self.what}, {format_seconds(spent)}"
        counted = f"{self.what} {self.done}/{self.total} {self.unit}".rstrip() + f", {format_seconds(spent)}"
        left = spent / self.done * (self.total - self.done) if self.done else 0.0
        return counted + (f", {format_seconds(left)} left" if left else "")


class Waits:
    """Says what is waited for: a line after `PATIENCE` seconds, then after ever longer times. Waits stand in each other.

    Args:
        say: function of such a line.
        show: function of the innermost wait at every look, e.g. of a bar; None shows nothing.
        clock: seconds of a clock.
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
        self._over, self._thread = Event(), Thread(target=self._look, name="waits", daemon=True)

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
        """Wait for something in the block."""
        now = self.clock()
        entered = PendingWait(what, total, unit, now)
        path = tuple(each.what for each in (*self.stack, entered))
        entered.due = now + self.pauses.get(path, PATIENCE)
        self.stack.append(entered)
        try:
            yield entered
        finally:
            self.stack.remove(entered)  # it may not be the last: a generator ends when it is collected
            if not self.stack:
                self.pauses.clear()

    def look(self) -> None:
        """Say the wait if one is due, and show the innermost."""
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

    def _look(self) -> None:
        while not self._over.wait(TICK):
            self.look()


CURRENT: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def wait_for(what: str, total: int = 0, unit: str = "") -> Iterator[PendingWait]:
    """Say that the block is what this process waits for, where a command or a run has opened `Waits`.

    Args:
        what: what is waited for, e.g. "rollout".
        total: number of parts that `advance` of the wait counts.
        unit: what the parts are.
    """
    waits = CURRENT.get()
    if waits is None:
        yield PendingWait(what, total, unit, 0.0)
        return
    with waits.wait(what, total, unit) as entered:
        yield entered


def count_parts(what: str, parts: Iterable[Part], size: int, total: int, unit: str = "samples") -> Iterator[Part]:
    """Yield parts of something that is waited for, each counted once the next is asked for.

    Args:
        what, total, unit: see `wait_for`.
        size: what each part counts for.
    """
    with wait_for(what, total, unit) as wait:
        for part in parts:
            yield part
            wait.advance(size)


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it: 12 s, 3 min 20 s, 5 h 10 min, 2 d 3 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            first, rest = divmod(whole, size)
            rest //= unit
            return f"{first} {large} {rest} {small}" if rest else f"{first} {large}"
    raise AssertionError(whole)
