"""Dynamic batching: a thread that processes the items of many requests in common batches.

Items are processed in the order of their requests. A batch holds items of the same kind, of one request or of several.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

from fluvial.engines.extensions.servers.asgi import RequestError

Item = TypeVar("Item")
Result = TypeVar("Result")
LONGEST_RETRY = 60  # largest Retry-After, in seconds


class _Request(Generic[Item, Result]):
    """Items of a request, with the results so far by index."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items, self.results = items, dict[int, Result]()
        self.future: Future[list[Result]] = Future()


class Batcher(Generic[Item, Result]):
    """Thread that computes one result per item.

    Args:
        make: function that returns the results of a batch. If it raises, it is called per request, so that only the faulty
            request fails, with the exception.
        alike: key of an item; a batch holds items with the same key.
        size: largest number of items per batch.
        linger: seconds that an incomplete batch waits for more requests.
        most_waiting: largest number of waiting items; a request beyond it is answered with 429.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        alike: Callable[[Item], Hashable],
        size: int,
        linger: float,
        most_waiting: int,
    ) -> None:
        self.make, self.alike = make, alike
        self.size, self.linger, self.most_waiting = size, linger, most_waiting
        self.begun, self.batches, self.rows = 0, 0, 0  # items in begun batches; finished batches, and items in them
        self._seconds = 0.0  # moving average of the time per batch
        self._queue: list[tuple[_Request[Item, Result], int]] = []  # requests, with indices of their items
        self._changed = threading.Condition()
        self._closed = False
        # A daemon, so that a batch that hangs does not keep the server alive.
        self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of items that wait for a batch."""
        with self._changed:
            return len(self._drop_unwanted())

    def submit(self, items: Sequence[Item]) -> "Future[list[Result]]":
        """Queue the items of a request, and return their future results. Cancelling the future drops waiting items.

        Raises:
            RequestError: too many items wait.
        """
        request = _Request[Item, Result](items)
        with self._changed:
            waiting = len(self._drop_unwanted())
            if waiting and waiting + len(items) > self.most_waiting:
                wait = min(max(math.ceil(waiting / self.size * self._seconds), 1), LONGEST_RETRY)
                raise RequestError(f"{waiting} samples are waiting: try again in {wait} s", 429, retry_after=wait)
            self._queue += [(request, index) for index in range(len(items))]
            self._changed.notify_all()
        return request.future

    def close(self, *, wait: float = 0.0) -> None:
        """End the thread after its current batch, and wait up to `wait` seconds for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(wait)

    def _serve(self) -> None:
        while (parts := self._wait_for_batch()) is not None:
            if parts:
                self._make(parts)

    def _drop_unwanted(self) -> list[tuple[_Request[Item, Result], int]]:
        """Drop the items of finished requests: the client has disconnected, or another item has failed. Return the queue."""
        self._queue = [part for part in self._queue if not part[0].future.done()]
        return self._queue

    def _wait_for_batch(self) -> list[tuple[_Request[Item, Result], int]] | None:
        """Wait for items, and return the next batch; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            until = time.monotonic() + self.linger
            while (wait := until - time.monotonic()) > 0 and not self._closed and len(self._find_alike()) < self.size:
                self._changed.wait(wait)
            parts = self._find_alike()[: self.size]
            batch = set(parts)
            self._queue = [part for part in self._queue if part not in batch]
            self.begun += len(parts)
            return parts

    def _find_alike(self) -> list[tuple[_Request[Item, Result], int]]:
        """Return the waiting items with the key of the first one."""
        kinds = [self.alike(request.items[index]) for request, index in self._drop_unwanted()]
        return [part for part, kind in zip(self._queue, kinds, strict=True) if kind == kinds[0]]

    def _make(self, parts: Sequence[tuple[_Request[Item, Result], int]]) -> None:
        start = time.monotonic()
        try:
            results = self.make([request.items[index] for request, index in parts])
        except Exception as error:  # also errors of the device, such as out of memory: the server continues
            requests = list(dict.fromkeys(request for request, _ in parts))
            if len(requests) == 1:
                with suppress(InvalidStateError):  # cancelled meanwhile
                    requests[0].future.set_exception(error)
                return
            for each in requests:
                self._make([part for part in parts if part[0] is each])
            return
        self.batches, self.rows = self.batches + 1, self.rows + len(parts)
        self._seconds += 0.2 * (time.monotonic() - start - self._seconds)
        for (request, index), result in zip(parts, results, strict=True):
            request.results[index] = result
            if len(request.results) == len(request.items):
                with suppress(InvalidStateError):
                    request.future.set_result([request.results[each] for each in range(len(request.items))])
