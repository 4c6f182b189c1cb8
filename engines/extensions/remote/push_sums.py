"""Checksums of a push, computed on a thread while tensors are gathered, written and sent."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Self

import torch
from torch import Tensor

from fluvial.engines.extensions.wire.weight_buckets import Checksum

ServerDtype = torch.dtype | None  # dtype of a server's weights; None, the trainer's, if the server does not report it
FILES: Literal["files"] = "files"  # kind of the checksum over all sent tensors, in the trainer's dtype


class PushSums:
    """Checksums by network and kind. A kind is `FILES`, or a server's dtype for the checksum of its parameters.

    Each byte is hashed once per kind that differs. The checksums are complete at the end of the context.

    Args:
        layouts: tensors of each network, in the order of sending: by name.
        names: names of each network's parameters, which a server's checksum covers.
        dtypes: dtypes of the servers.
        most_bytes: largest number of bytes that wait to be hashed, beyond the last tensor.
        files: whether to compute the checksum of kind `FILES`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Mapping[str, Tensor]],
        names: Mapping[str, Collection[str]],
        dtypes: Collection[ServerDtype],
        most_bytes: int,
        *,
        files: bool = False,
    ) -> None:
        self._names, self._most = names, most_bytes
        self._sums = dict[tuple[str, ServerDtype | Literal["files"]], Checksum]()
        for part, tensors in layouts.items():
            whole, trainer_dtypes = Checksum(), {tensor.dtype for tensor in tensors.values()}
            is_plain = len(trainer_dtypes) == 1 and tensors.keys() == {*names[part]}
            for dtype in dtypes:
                self._sums[part, dtype] = whole if is_plain and dtype in (None, *trainer_dtypes) else Checksum(dtype)
            if files:
                self._sums[part, FILES] = whole
        self._waiting = deque[tuple[int, Future[None]]]()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=error[0] is not None)
        if error[0] is None:
            self._wait(0)

    def watch(self, part: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the next tensors of a network, and hash them in the background: they must not change any more."""
        for name, tensor in tensors:
            in_names = name in self._names[part]
            sums = {each for (network, kind), each in self._sums.items() if network == part and (in_names or kind == FILES)}
            self._wait(self._most)
            self._waiting.append((tensor.nbytes, self._pool.submit(_add, sums, name, tensor)))
            yield name, tensor

    def add_scaling(self, scaling: float) -> None:
        """Hash the scale of the adapters, after their factors."""
        for each in {*self._sums.values()}:
            self._waiting.append((0, self._pool.submit(each.add_scaling, scaling)))

    def hexdigests(self) -> dict[tuple[str, ServerDtype | Literal["files"]], str]:
        """Return the checksums in hexadecimal."""
        return {key: each.hexdigest() for key, each in self._sums.items()}

    def _wait(self, most: int) -> None:
        """Wait until at most `most` bytes are queued; raise the error of a failed task."""
        while self._waiting and (most == 0 or sum(size for size, _ in self._waiting) > most):
            self._waiting.popleft()[1].result()


def _add(sums: Collection[Checksum], name: str, tensor: Tensor) -> None:
    for each in sums:
        each.add(name, tensor)
