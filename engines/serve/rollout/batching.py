"""One thread that makes what many requests ask for, in batches of one fixed size.

Samples are taken in the order of their requests. A batch holds samples of one recipe, of one request or of several, and is
filled up with repeats. So the network computes the same number of rows whatever there is to make, and the bits of a sample
do not depend on what else is asked for.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from fluvial.engines.errors import RunError
from fluvial.engines.serve.asgi import RequestError
from fluvial.engines.serve.rollout.orders import Order, Ordered, Recipe
from fluvial.engines.serve.rollout.policy import Policy
from fluvial.engines.serve.rollout.sampling import Made, made

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most


class _Work:
    """The orders of one request.

    Args:
        ordered: the request.
        until: time at which its answer is no longer awaited.
    """

    def __init__(self, ordered: Ordered, until: float) -> None:
        self.recipe, self.orders, self.until = ordered.recipe, ordered.orders, until
        self.future: Future[list[Made]] = Future()
        self.taken, self.made = 0, dict[int, Made]()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for more samples: the client has gone, the time is over, or a sample has failed."""
        return self.future.done() or time.monotonic() > self.until

    @property
    def left(self) -> int:
        """Number of samples that no batch has taken."""
        return len(self.orders) - self.taken

    def receive(self, place: int, sample: Made) -> None:
        """Take a sample in; the last one completes the request."""
        self.made[place] = sample
        if len(self.made) == len(self.orders):
            with suppress(InvalidStateError):  # cancelled at this moment
                self.future.set_result([self.made[number] for number in range(len(self.orders))])

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


Part = tuple[_Work, int]  # a sample of a request


class RolloutBatcher:
    """Makes samples on a thread of its own.

    Args:
        policy: the model.
        micro_batch: rows of every batch.
        linger: seconds that a batch which is not full waits for more requests.
        most_waiting: largest number of samples that wait; a request beyond it is answered with 429.
    """

    def __init__(self, policy: Policy, *, micro_batch: int, linger: float, most_waiting: int) -> None:
        self.policy, self.micro_batch, self.linger, self.most_waiting = policy, micro_batch, linger, most_waiting
        self.begun, self.batches, self.rows = 0, 0, 0  # samples that batches took; batches made, and samples in them
        self._seconds = 1.0  # of a batch, on average
        self._queue: list[_Work] = []
        self._news = threading.Condition()
        self._closed = False
        # A daemon: a batch that takes minutes does not keep the server alive.
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of samples that wait for a batch."""
        with self._news:
            self._drop()
            return sum(work.left for work in self._queue)

    def submit(self, ordered: Ordered, *, deadline: float) -> "Future[list[Made]]":
        """Return the future samples of a request. Those of a cancelled future are not made, unless a batch has begun.

        Args:
            ordered: the request.
            deadline: seconds after which its samples are not wanted any more.

        Raises:
            RequestError: too many samples wait.
        """
        work = _Work(ordered, time.monotonic() + deadline)
        with self._news:
            self._drop()
            waiting = sum(each.left for each in self._queue)
            if waiting and waiting + work.left > self.most_waiting:
                wait = min(max(math.ceil(waiting / self.micro_batch * self._seconds), 1), LONGEST_RETRY)
                raise RequestError(429, f"{waiting} samples are waiting: try again in {wait} s", retry_after=wait)
            self._queue.append(work)
            self._news.notify_all()
        return work.future

    def close(self, *, wait: float = 0.0) -> None:
        """Let the thread end after the batch that it makes, and wait up to `wait` seconds for it."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(wait)

    def _serve(self) -> None:
        while (parts := self._next()) is not None:
            if parts:
                self._make(parts)

    def _next(self) -> list[Part] | None:
        """Wait for samples, and return those of the next batch; None at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            until = time.monotonic() + self.linger
            while (wait := until - time.monotonic()) > 0 and not self._closed and self._alike() < self.micro_batch:
                self._news.wait(wait)
            self._drop()
            return self._taken()

    def _alike(self) -> int:
        """Return how many samples wait that fit into one batch with the first."""
        self._drop()
        return sum(work.left for work in self._queue if work.recipe == self._queue[0].recipe)

    def _taken(self) -> list[Part]:
        parts: list[Part] = []
        for work in list(self._queue):
            if work.recipe != self._queue[0].recipe:
                continue
            count = min(work.left, self.micro_batch - len(parts))
            parts += [(work, work.taken + number) for number in range(count)]
            work.taken += count
        self.begun += len(parts)
        self._drop()
        return parts

    def _drop(self) -> None:
        """Forget the requests that are over, and those of which every sample is taken."""
        self._queue = [work for work in self._queue if work.left and not work.is_over]

    def _make(self, parts: Sequence[Part]) -> None:
        """Make one batch; where it fails, one per request, so that a request fails alone."""
        parts = self._of_version(parts)
        if not parts:
            return
        recipe, orders = parts[0][0].recipe, [work.orders[place] for work, place in parts]
        try:
            samples = self._batch(recipe, orders)
        except Exception as error:  # also of the device, such as out of memory: the server goes on
            works = list(dict.fromkeys(work for work, _ in parts))
            if len(works) == 1:
                works[0].fail(_failure(error))
                return
            for each in works:
                self._make([(work, place) for work, place in parts if work is each])
            return
        for (work, place), sample in zip(parts, samples, strict=True):
            work.receive(place, sample)

    def _batch(self, recipe: Recipe, orders: Sequence[Order]) -> list[Made]:
        start = time.monotonic()
        with self.policy.sampling() as module:
            wanted = {order.version for order in orders} - {None, self.policy.version}
            if wanted:
                raise wrong_version(next(iter(wanted)), self.policy.version)
            samples = made(self.policy, module, recipe, orders, micro_batch=self.micro_batch)
        self.batches, self.rows = self.batches + 1, self.rows + len(orders)
        self._seconds += 0.2 * (time.monotonic() - start - self._seconds)
        return samples

    def _of_version(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts whose weights are the present ones; the others fail, because weights do not go back."""
        kept: list[Part] = []
        for work, place in parts:
            wanted, version = work.orders[place].version, self.policy.version
            if wanted in (None, version):
                kept.append((work, place))
            else:
                work.fail(wrong_version(wanted, version))
        return kept


def wrong_version(wanted: Any, version: int) -> RequestError:
    """Return the error of a request for other weights than the server has."""
    return RequestError(
        409, f"the weights have version {version}, and the request asks for {wanted}: push these weights first"
    )


def _failure(error: Exception) -> Exception:
    """Return the error that a client is told."""
    if isinstance(error, RequestError):
        return error
    said = " ".join(str(error).split()) or type(error).__name__
    return RequestError(400, said) if isinstance(error, ValueError) else RunError(f"the samples cannot be made: {said}")
