"""Scores of a batch whose parts are sent at the same time; parts that fail have none."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.wire.threads import in_threads


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
    scores, failures = dict[int, Tensor](), dict[int, RunError]()
    with in_threads(function, parts, at_once=at_once) as results:
        for place, result in results:
            if isinstance(result, RunError):
                failures[place] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                scores[place] = torch.tensor(list(result), dtype=torch.float32)
    if failures and not scores:
        raise failures[0]
    if failures:
        lost = sum(parts[place].stop - parts[place].start for place in failures)
        warnings.warn(f"{lost} of {count} samples have no score: {failures[min(failures)]}", RuntimeWarning, stacklevel=2)
    shape = next((tensor.shape[1:] for tensor in scores.values()), ())
    found = torch.full((count, *shape), torch.nan)
    for place, tensor in scores.items():
        found[parts[place]] = tensor
    return found
