"""Checksums of a push, computed on a thread while its tensors are gathered, written and sent."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Self

import torch
from torch import Tensor

from fluvial.engines.extensions.wire.weight_buckets import Checksum

Dtype = torch.dtype | None  # of a server's weights; None where it does not say, and then the trainer's own
FILES: Literal["files"] = "files"  # kind of the checksum of all tensors that are sent, in the trainer's dtype


class PushSums:
    """Checksums by network and kind: `FILES`, or the dtype of a server, of whose parameters it is.

    Each byte is hashed once per kind that differs. A context, at whose end the checksums are complete.

    Args:
        layouts: tensors of each network, which are sent in the order of their names.
        names: names of those that a server's checksum is of.
        dtypes: dtypes of the servers.
        most_bytes: bytes of tensors that wait to be hashed, at most, beyond the last one.
        files: whether there is a checksum of kind `FILES`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Mapping[str, Tensor]],
        names: Mapping[str, Collection[str]],
        dtypes: Collection[Dtype],
        most_bytes: int,
        *,
        files: bool = False,
    ) -> None:
        self._own, self._most, self._sums = names, most_bytes, dict[tuple[str, Dtype | Literal["files"]], Checksum]()
        for part, tensors in layouts.items():
            whole, held = Checksum(), {tensor.dtype for tensor in tensors.values()}
            is_plain = len(held) == 1 and tensors.keys() == {*names[part]}
            for dtype in dtypes:
                self._sums[part, dtype] = whole if is_plain and dtype in (None, *held) else Checksum(dtype)
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
        """Yield the next tensors of a network as they come, and hash them meanwhile: they may not change any more."""
        for name, tensor in tensors:
            is_own = name in self._own[part]
            sums = {each for (of, kind), each in self._sums.items() if of == part and (is_own or kind == FILES)}
            self._wait(self._most)
            self._waiting.append((tensor.nbytes, self._pool.submit(_add, sums, name, tensor)))
            yield name, tensor

    def add_scaling(self, scaling: float) -> None:
        """Take the scale of the adapters whose factors were the tensors."""
        for each in {*self._sums.values()}:
            self._waiting.append((0, self._pool.submit(each.add_scaling, scaling)))

    def hexdigests(self) -> dict[tuple[str, Dtype | Literal["files"]], str]:
        """Return the checksums."""
        return {key: each.hexdigest() for key, each in self._sums.items()}

    def _wait(self, most: int) -> None:
        """Wait until at most `most` bytes wait; raise what failed."""
        while self._waiting and (most == 0 or sum(size for size, _ in self._waiting) > most):
            self._waiting.popleft()[1].result()


def _add(sums: Collection[Checksum], name: str, tensor: Tensor) -> None:
    for each in sums:
        each.add(name, tensor)
