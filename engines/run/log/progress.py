"""Progress of a run: a bar on a terminal, a line per update elsewhere, and pending waits on both."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from fluvial.engines.waits import Waits, format_seconds

RECENT = 10  # rollouts whose speed gives the remaining time
NARROW = 100  # width of a terminal, in columns, below which the bar is short


class RunProgress(ExitStack):
    """Progress over optimizer updates.

    A terminal shows count, bar, remaining time, the numbers of the last update and the pending wait in one line, cut off at
    its end. Elsewhere there is a line per `every` updates.

    Args:
        console: console to write to; None is silent, for all ranks but the first.
        total: number of updates of the run.
        done: number of updates at the start.
        every: number of updates between lines if the console is not a terminal.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        console: Console | None,
        *,
        total: int,
        done: int = 0,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.console, self.total, self.done, self.every, self.clock = console, total, done, every, clock
        self.bar: Progress | None = None
        self.numbers, self.waits = "", ""
        self.marks = deque[tuple[float, int]](maxlen=RECENT + 1)
        if console is not None and console.is_terminal:
            self.bar = Progress(
                TextColumn("update {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=10 if console.width < NARROW else 20),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[status]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=console,
                expand=True,
                transient=True,  # later output follows the lines, without the bar between
            )
            self.task = self.bar.add_task("update", total=total, completed=done, status="", left="")

    def __enter__(self) -> Self:
        super().__enter__()
        if self.console is not None:
            self.enter_context(Waits(self.say_wait, show=self.show_phase if self.bar else None, clock=self.clock))
        return self

    def begin(self, done: int) -> None:
        """Begin to count updates after the first `done`."""
        self.done = done
        self.mark()
        if self.bar:
            self.bar.update(self.task, completed=done)
            self.enter_context(self.bar)

    def mark(self) -> None:
        """Restart the measurement of speed now."""
        self.marks.clear()
        self.marks.append((self.clock(), self.done))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last update, at the speed of the last `RECENT` rollouts; None before the first."""
        if len(self.marks) < 2:
            return None
        (began, first), (ended, last) = self.marks[0], self.marks[-1]
        return (ended - began) / (last - first) * (self.total - self.done)

    def advance(self, numbers: Mapping[str, float], seconds: Mapping[str, float], *, updates: int = 1) -> None:
        """Advance by `updates`, and show their numbers and the seconds of their phases."""
        before, self.done = self.done, self.done + updates
        self.marks.append((self.clock(), self.done))
        ends = self.seconds_left is None or self.done == self.total
        left = "" if ends else f"{format_seconds(self.seconds_left or 0.0)} left"
        self.numbers = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        phases = " ".join(f"{phase} {value:.2f}s" for phase, value in seconds.items())
        if self.bar:
            self.bar.update(self.task, completed=self.done, left=left)
            self.show_phase(phases)
        elif self.done // self.every > before // self.every or self.done == self.total:
            parts = (f"update {self.done}/{self.total}", left, self.numbers, phases)
            self.say("  ".join(part for part in parts if part))

    def show_phase(self, name: str) -> None:
        """Show the current phase beside the bar; without a bar nothing is shown."""
        if self.bar and self.bar.live.is_started:
            first, *others = self.numbers.split("  ")
            self.bar.update(self.task, status="  ".join(part for part in (first, name, *others) if part))

    def say(self, line: str) -> None:
        """Print a line above the bar, without line breaks, so that a command in it can be copied."""
        if self.console:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def say_wait(self, line: str) -> None:
        """Print the line of a wait, unless the bar shows it."""
        if not (self.bar and self.bar.live.is_started):
            self.say(line)


def table(title: str, columns: tuple[str, ...], rows: Mapping[str, tuple[str, ...]]) -> Table:
    """Return a table of named rows for the console."""
    sheet = Table(title=title, title_justify="left")
    sheet.add_column("")
    for column in columns:
        sheet.add_column(column, justify="right")
    for name, cells in rows.items():
        sheet.add_row(name, *cells)
    return sheet
