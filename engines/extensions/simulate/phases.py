"""Phases of a program, and the peak of each."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from fluvial.engines.extensions.simulate.mode import SimulatedMode


class Phase(NamedTuple):
    """The memory of a phase, its visits taken together."""

    before: int  # bytes at the beginning of the first visit
    peak: int
    after: int  # bytes at the end of the last visit
    peak_entry: int  # entry of the ledger at the peak
    spans: tuple[tuple[int, int], ...]  # entries of the ledger between which it ran


class Phases:
    """The phases of a program under a mode. A phase within another takes its operations out of it."""

    def __init__(self, mode: SimulatedMode) -> None:
        self.mode = mode
        self.found: dict[str, Phase] = {}
        self._start = 0  # entry at which the present phase began

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what happens in the context for a phase."""
        outer = self.mode.phase
        if outer == name:
            yield
            return
        self._end(outer)
        self._begin(name)
        try:
            yield
        finally:
            self._end(name)
            self._begin(outer)

    def _begin(self, name: str) -> None:
        ledger = self.mode.ledger
        self.mode.phase, self._start = name, ledger.entries
        ledger.reset_peak()
        if name and name not in self.found:
            self.found[name] = Phase(ledger.now, 0, ledger.now, ledger.entries, ())

    def _end(self, name: str) -> None:
        ledger, known = self.mode.ledger, self.found.get(name)
        if known is None:
            return
        higher = ledger.peak > known.peak
        self.found[name] = known._replace(
            peak=ledger.peak if higher else known.peak,
            peak_entry=ledger.peak_entry if higher else known.peak_entry,
            after=ledger.now,
            spans=(*known.spans, (self._start, ledger.entries)),
        )
