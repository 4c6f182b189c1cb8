"""Send the parts of a batch at the same time, and say what becomes of the parts that fail."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fluvial.engines.errors import RunError

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Sequence[Item], *, at_once: int) -> list[Result | RunError]:
    """Return the result of each item in order, or the RunError that it ended with.

    The threads are daemons, so that a request which hangs does not keep a process alive that is asked to end.

    Args:
        function: function to call.
        items: its arguments.
        at_once: largest number of threads.
    """
    results: list[Result | BaseException | None] = [None] * len(items)
    numbers, lock = iter(range(len(items))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(items[number])
            except BaseException as error:
                results[number] = error

    if at_once == 1 or len(items) <= 1:
        work()
    else:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(items)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found: list[Result | RunError] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RunError):
            raise result
        found.append(result)  # type: ignore[arg-type]
    return found


def in_batches(function: Callable[[slice], Sequence[object]], count: int, *, batch: int, at_once: int) -> Tensor:
    """Return the scores `[B, ...]` of samples that are scored in batches, NaN for those of a batch that failed.

    Args:
        function: function that scores the samples of a slice: a number, or a list of as many numbers, for each.
        count: number of samples.
        batch: largest number of samples per call.
        at_once: largest number of calls at the same time.

    Raises:
        RunError: all batches failed; the error is that of the first.
    """
    parts = [slice(start, min(start + batch, count)) for start in range(0, count, batch)]
    found = each(function, parts, at_once=at_once)
    failures = [result for result in found if isinstance(result, RunError)]
    if failures and len(failures) == len(found):
        raise failures[0]
    if failures:
        lost = sum(part.stop - part.start for part, result in zip(parts, found, strict=True) if isinstance(result, RunError))
        warnings.warn(f"{lost} of {count} samples have no score: {failures[0]}", RuntimeWarning, stacklevel=2)
    tensors = [None if isinstance(result, RunError) else torch.tensor(list(result), dtype=torch.float32) for result in found]
    shape = next((tensor.shape[1:] for tensor in tensors if tensor is not None), ())
    scores = torch.full((count, *shape), torch.nan)
    for part, tensor in zip(parts, tensors, strict=True):
        if tensor is not None:
            scores[part] = tensor
    return scores
