"""One thread that works through what many requests ask for, in common batches.

Items are taken in the order of their requests. A batch holds items that are alike, of one request or of several.
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
LONGEST_RETRY = 60  # seconds that a client is asked to wait at most


class _Request(Generic[Item, Result]):
    """The items of a request, and the results so far by their place."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items, self.results = items, dict[int, Result]()
        self.future: Future[list[Result]] = Future()


class Batcher(Generic[Item, Result]):
    """Makes one result per item on a thread of its own.

    Args:
        make: function that returns the results of a batch. Where it raises, it is called per request, so that a request
            fails alone, with the exception.
        alike: function of an item; a batch holds items with the same value.
        size: largest number of items per batch.
        linger: seconds that a batch which is not full waits for more requests.
        most_waiting: largest number of items that wait; a request beyond it is answered with 429.
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
        self.begun, self.batches, self.rows = 0, 0, 0  # items that batches took; batches made, and items in them
        self._seconds = 0.0  # of a batch, on average
        self._queue: list[tuple[_Request[Item, Result], int]] = []  # requests and places of their items
        self._news = threading.Condition()
        self._closed = False
        # A daemon: a batch that hangs does not keep the server alive.
        self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of items that wait for a batch."""
        with self._news:
            return len(self._drop_unwanted())

    def submit(self, items: Sequence[Item]) -> "Future[list[Result]]":
        """Return the future results of a request. Items of a cancelled future are dropped, unless their batch has begun.

        Raises:
            RequestError: too many items wait.
        """
        request = _Request[Item, Result](items)
        with self._news:
            waiting = len(self._drop_unwanted())
            if waiting and waiting + len(items) > self.most_waiting:
                wait = min(max(math.ceil(waiting / self.size * self._seconds), 1), LONGEST_RETRY)
                raise RequestError(f"{waiting} samples are waiting: try again in {wait} s", 429, retry_after=wait)
            self._queue += [(request, place) for place in range(len(items))]
            self._news.notify_all()
        return request.future

    def close(self, *, wait: float = 0.0) -> None:
        """End the thread after the batch that it makes, and wait up to `wait` seconds for it."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(wait)

    def _serve(self) -> None:
        while (parts := self._next()) is not None:
            if parts:
                self._make(parts)

    def _drop_unwanted(self) -> list[tuple[_Request[Item, Result], int]]:
        """Drop the items of requests that are over: the client has gone, or another item has failed."""
        self._queue = [part for part in self._queue if not part[0].future.done()]
        return self._queue

    def _next(self) -> list[tuple[_Request[Item, Result], int]] | None:
        """Wait for items, and return those of the next batch; None at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            until = time.monotonic() + self.linger
            while (wait := until - time.monotonic()) > 0 and not self._closed and len(self._alike()) < self.size:
                self._news.wait(wait)
            parts = self._alike()[: self.size]
            taken = set(parts)
            self._queue = [part for part in self._queue if part not in taken]
            self.begun += len(parts)
            return parts

    def _alike(self) -> list[tuple[_Request[Item, Result], int]]:
        """Return the waiting items that are alike the first."""
        kinds = [self.alike(request.items[place]) for request, place in self._drop_unwanted()]
        return [part for part, kind in zip(self._queue, kinds, strict=True) if kind == kinds[0]]

    def _make(self, parts: Sequence[tuple[_Request[Item, Result], int]]) -> None:
        start = time.monotonic()
        try:
            results = self.make([request.items[place] for request, place in parts])
        except Exception as error:  # also of the device, such as out of memory: the server goes on
            requests = list(dict.fromkeys(request for request, _ in parts))
            if len(requests) == 1:
                with suppress(InvalidStateError):  # cancelled at this moment
                    requests[0].future.set_exception(error)
                return
            for each in requests:
                self._make([part for part in parts if part[0] is each])
            return
        self.batches, self.rows = self.batches + 1, self.rows + len(parts)
        self._seconds += 0.2 * (time.monotonic() - start - self._seconds)
        for (request, place), result in zip(parts, results, strict=True):
            request.results[place] = result
            if len(request.results) == len(request.items):
                with suppress(InvalidStateError):
                    request.future.set_result([request.results[number] for number in range(len(request.items))])
