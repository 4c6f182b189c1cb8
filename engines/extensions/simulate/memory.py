"""Ledger of a simulated device's memory: each storage from its creation until it is freed, by line of the program."""

import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

POINTS = 600  # largest number of points of a curve


class Ledger:
    """Bytes of the live storages of a device over all operations, without the rounding of an allocator.

    A storage counts once, however many tensors view it. Resizing it changes its bytes; FSDP2 frees parameters so.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.peak_entry = 0  # number of entries up to the peak
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}  # by address: ref, size, line
        self._lines: dict[str, int] = {}
        self._inner: list[SimpleNamespace] = []
        self._line_of, self._change = array("l"), array("q")  # of each entry

    @property
    def entries(self) -> int:
        """Number of changes of the memory so far."""
        return len(self._change)

    def add(self, storage: torch.UntypedStorage, line: str) -> None:
        """Add a storage returned by an operation, unless it is known."""
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            if known[1] != size:
                self.note_resize(storage)
            return
        number = self._lines.setdefault(line, len(self._lines))
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), size, number
        self._enter(number, size)

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage already counts with its current size."""
        known = self._storages.get(storage._cdata)
        return known is not None and known[1] == storage.nbytes()

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Enter the new size of a resized storage."""
        known = self._storages.get(storage._cdata)
        if known is not None:
            reference, before, number = known
            self._storages[storage._cdata] = reference, storage.nbytes(), number
            self._enter(number, storage.nbytes() - before)

    def reset_peak(self) -> None:
        """Start a new peak at the current bytes."""
        self.peak, self.peak_entry = self.now, self.entries

    def add_spike(self, size: int, line: str) -> None:
        """Enter bytes that are freed immediately."""
        number = self._lines.setdefault(line, len(self._lines))
        self._enter(number, size)
        self._enter(number, -size)

    @contextmanager
    def track_peak(self) -> Iterator[SimpleNamespace]:
        """Yield an object whose `peak` is the largest number of bytes within the context."""
        inner = SimpleNamespace(peak=self.now)
        self._inner.append(inner)
        try:
            yield inner
        finally:
            self._inner.remove(inner)

    def find_holders(self, entry: int) -> dict[str, int]:
        """Return the bytes held by each line of the program after `entry` entries, largest first."""
        sums: Counter[int] = Counter()
        for number, change in zip(self._line_of[:entry], self._change[:entry], strict=True):
            sums[number] += change
        names = list(self._lines)
        return {names[number]: size for number, size in sums.most_common() if size > 0}

    def sample_curves(self, lines: list[str]) -> tuple[list[int], dict[str, list[int]]]:
        """Return up to `POINTS` entries, and the bytes held at them by each of the lines and by all others.

        Each point is the largest moment of its interval, so no peak is lost.
        """
        numbers = {self._lines[line]: line for line in lines}
        sums, rest, total = dict.fromkeys(lines, 0), 0, 0
        width = max(1, -(-self.entries // POINTS))
        at, sizes = list[int](), {line: list[int]() for line in [*lines, "others"]}
        highest: tuple[int, int, dict[str, int], int] | None = None
        for entry, (number, change) in enumerate(zip(self._line_of, self._change, strict=True), start=1):
            total += change
            if number in numbers:
                sums[numbers[number]] += change
            else:
                rest += change
            if highest is None or total > highest[0]:
                highest = total, entry, dict(sums), rest
            if entry % width == 0 or entry == self.entries:
                at.append(highest[1])
                for line, size in highest[2].items():
                    sizes[line].append(size)
                sizes["others"].append(highest[3])
                highest = None
        return at, sizes

    def _forget(self, key: int) -> None:
        _, size, number = self._storages.pop(key)
        self._enter(number, -size)

    def _enter(self, number: int, change: int) -> None:
        if not change:
            return
        self._line_of.append(number)
        self._change.append(change)
        self.now += change
        for inner in self._inner:
            inner.peak = max(inner.peak, self.now)
        if self.now > self.peak:
            self.peak, self.peak_entry = self.now, self.entries
