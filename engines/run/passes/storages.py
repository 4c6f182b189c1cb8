"""Bytes of live storages, measured on any device."""

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

STORAGE: Any = torch.UntypedStorage


class LiveStorages(TorchDispatchMode):
    """Track the bytes of every storage that an operation reads or writes while the mode is on, and their largest sum.

    A storage counts once, however many tensors view it, from the first operation that touches it until it is freed, with
    its size at each moment: FSDP frees and fills storages by resizing them. The mode works on any device and in the
    backward pass. It does not see memory that an operation allocates and frees internally (workspaces), nor memory that an
    allocator holds beyond the requested sizes.

    Args:
        exclude: tensors whose storages are not counted, e.g. existing ones.
        meta: count only storages on the meta device, as stand-ins for those of a real device. Otherwise they are ignored,
            because PyTorch creates some to compute shapes.
    """

    def __init__(self, exclude: Iterable[Tensor] = (), *, meta: bool = False) -> None:
        super().__init__()
        # The references keep them alive, so that no new storage gets the id of an excluded one.
        self._excluded = {id(storage): storage for storage in map(_storage, exclude)}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._meta = meta
        self.now = self.peak = 0  # bytes of the live storages, and their largest sum

    def __enter__(self) -> Self:
        self._resize = resize = STORAGE.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._live:
                self._track(storage)
            return result

        # Resizing is not an operation that the mode sees, and summing thousands of sizes after each operation is slow.
        STORAGE.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        STORAGE.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it returns here as operations on local tensors
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._track(_storage(leaf))
        self.peak = max(self.peak, self.now)
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._live:
            reference, before = self._live[key]
        elif key not in self._excluded and (storage.device.type == "meta") == self._meta:
            reference, before = weakref.ref(storage, lambda _: self._forget(key)), 0
        else:
            return
        self._live[key] = reference, size
        self.now += size - before

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of this rank's part if it is sharded."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
