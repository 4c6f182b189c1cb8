"""Progress of a run: a bar on a terminal, a line every few updates elsewhere."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


class RunProgress(ExitStack):
    """Progress over updates.

    Args:
        console: console to write to; None is silent, for all ranks but the first.
        total: number of updates of the run.
        done: number of updates at the start.
        every: number of updates between lines if the console is not a terminal.
    """

    def __init__(self, console: Console | None, *, total: int, done: int = 0, every: int = 10) -> None:
        super().__init__()
        self.console, self.total, self.done, self.every = console, total, done, every
        self.bar: Progress | None = None
        if console is not None and console.is_terminal:
            self.bar = Progress(
                TextColumn("update"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("update", total=total, completed=done, status="")

    def __enter__(self) -> Self:
        if self.bar:
            self.enter_context(self.bar)
        return super().__enter__()

    def advance(self, numbers: Mapping[str, float], seconds: Mapping[str, float], *, updates: int = 1) -> None:
        """Advance by `updates`, and show their numbers and the seconds of their phases."""
        before, self.done = self.done, self.done + updates
        status = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        status += "  " + " ".join(f"{phase} {value:.2f}s" for phase, value in seconds.items())
        if self.bar:
            self.bar.update(self.task, completed=self.done, status=status)
        elif self.console and (self.done // self.every > before // self.every or self.done == self.total):
            self.say(f"update {self.done}/{self.total}  {status}")

    def phase(self, name: str) -> None:
        """Show what is done before the first update, beside the bar; without a bar nothing is shown."""
        if self.bar:
            self.bar.update(self.task, status=name)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.console:
            self.console.print(line, highlight=False, soft_wrap=True)


def table(title: str, columns: tuple[str, ...], rows: Mapping[str, tuple[str, ...]]) -> Table:
    """Return a table of named rows for the console."""
    sheet = Table(title=title, title_justify="left")
    sheet.add_column("")
    for column in columns:
        sheet.add_column(column, justify="right")
    for name, cells in rows.items():
        sheet.add_row(name, *cells)
    return sheet
