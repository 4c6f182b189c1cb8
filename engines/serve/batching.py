"""One thread per reward, which scores what many requests ask for in common batches."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from fluvial.engines.serve.asgi import RequestError
from fluvial.engines.serve.formats import Sample


class Outcome(NamedTuple):
    """What became of a sample: a score with further numbers, or NaN and a line that says why."""

    score: float
    parts: dict[str, float]
    problem: str = ""
    raised: bool = False  # whether the reward raised, rather than give no valid number


class _Work(NamedTuple):
    """Samples of one request."""

    samples: Sequence[Sample]
    future: "Future[list[Outcome]]"


class Batcher:
    """Scores samples on a thread of its own, those of several requests at once.

    Args:
        score: function that returns one outcome per sample, for samples of one shape.
        batch: largest number of samples per call.
        linger: seconds that a request waits for others to fill a batch.
        most_waiting: largest number of samples that wait; a request beyond it is answered with 429.
    """

    def __init__(
        self, score: Callable[[Sequence[Sample]], list[Outcome]], *, batch: int, linger: float, most_waiting: int
    ) -> None:
        self.score, self.batch, self.linger, self.most_waiting = score, batch, linger, most_waiting
        self.waiting = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        # A daemon: a reward that hangs does not keep the server alive.
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    async def scored(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample. Samples of a caller that is cancelled are not scored.

        Raises:
            RequestError: too many samples wait.
        """
        with self._lock:
            if self.waiting and self.waiting + len(samples) > self.most_waiting:
                raise RequestError(
                    429, f"{self.waiting} samples are waiting for this reward: try again later", retry_after=1
                )
            self.waiting += len(samples)
        work = _Work(samples, Future())
        self._queue.put(work)
        return await asyncio.wrap_future(work.future)

    def close(self) -> None:
        """Let the thread end, without waiting for a call that hangs."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            works = [work, *self._further(len(work.samples))]
            with self._lock:
                self.waiting -= sum(len(each.samples) for each in works)
            wanted = [each for each in works if each.future.set_running_or_notify_cancel()]
            samples = [sample for each in wanted for sample in each.samples]
            outcomes = iter(self._outcomes(samples))
            for each in wanted:
                each.future.set_result([next(outcomes) for _ in each.samples])

    def _further(self, count: int) -> Iterator[_Work]:
        """Yield the requests that come in time to fill the batch, which `count` samples begin."""
        until = time.monotonic() + self.linger
        while count < self.batch:
            try:
                work = self._queue.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                return
            if work is None:
                self._queue.put(None)  # the end, for the loop above
                return
            count += len(work.samples)
            yield work

    def _outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, of any shapes."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for number, sample in enumerate(samples):
            shapes.setdefault(tuple(sample.image.shape), []).append(number)
        found: dict[int, Outcome] = {}
        for numbers in shapes.values():
            for start in range(0, len(numbers), self.batch):
                part = numbers[start : start + self.batch]
                found.update(zip(part, self._called([samples[number] for number in part]), strict=True))
        return [found[number] for number in range(len(samples))]

    def _called(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcomes of one call; where it raises, of a call per sample, so that one sample fails alone."""
        try:
            return self.score(samples)
        except BaseException as error:  # also a reward that calls sys.exit: the server goes on
            if len(samples) > 1:
                return [outcome for sample in samples for outcome in self._called([sample])]
            return [
                Outcome(float("nan"), {}, f"raised {type(error).__name__} ({' '.join(str(error).split())})", raised=True)
            ]
