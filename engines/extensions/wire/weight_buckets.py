"""Weights between a trainer and servers: checksums, the buckets that tensors travel in, and a group that broadcasts them.

The group is of gloo, and carries raw bytes: no pickles, no files.
"""

import hashlib
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta, Struct, to_builtins
from torch import Tensor

from fluvial.engines.errors import RunError, convert_errors
from fluvial.engines.extensions.wire.decode import WireError, convert
from fluvial.engines.extensions.wire.tensors import DTYPES, Shape
from fluvial.models.digests import read_bytes

# What a server calls the dtype of its weights (`dit_precision` of GET /v1/models).
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FACTORS = ".lora"  # after the name of a network: the checksum of its adapter, which only fluvial's own server reports
UNKNOWN = "not_found"  # checksum of a network, or of an adapter, that a server does not have
SHARED_FILES = "fluvial_shared_files"  # load_format of buckets in files, which fluvial's own server takes
BROADCAST = "fluvial_broadcast"  # load_format of buckets that a group broadcasts
MOST_BUCKETS = 4096
TIMEOUT = 60.0  # seconds that joining a group, or one broadcast, may take
Offset = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
SCALING = "~scaling"  # name of an adapter's scale among its tensors; it comes after every other name


class Checksum:
    """The SHA-256 of named tensors as sglang's `get_weights_checksum` computes it, one tensor after the other.

    Each name's bytes are followed by the bytes of its tensor, in the order of the names.

    Args:
        dtype: dtype that floating-point tensors are cast to.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype, self._last, self._digest = dtype, "", hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor; ValueError if its name does not come after the last one."""
        if name <= self._last:
            raise ValueError(f"checksum: {name} comes after {self._last}, expected names in ascending order")
        plain = tensor.detach() if self.dtype is None or not tensor.is_floating_point() else tensor.detach().to(self.dtype)
        self._digest.update(name.encode())
        self._digest.update(read_bytes(plain))
        self._last = name

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the next tensors, in the order of their names."""
        for name, tensor in tensors:
            self.add(name, tensor)

    def add_scaling(self, scaling: float) -> None:
        """Take the scale of an adapter, after all of its factors."""
        # As an integer, so that no dtype changes it.
        self.add(SCALING, torch.tensor(scaling, dtype=torch.float64).view(torch.int64))

    def hex(self) -> str:
        """Return the digest of the tensors so far."""
        return self._digest.hexdigest()


def checksum(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None) -> str:
    """Return the `Checksum` of (name, tensor) in the order of the names. One tensor at a time is held."""
    total = Checksum(dtype)
    total.add_all(tensors)
    return total.hex()


def adapter_checksum(factors: Mapping[str, Tensor], scaling: float, *, dtype: torch.dtype | None = None) -> str:
    """Return the checksum of an adapter's factors and of the scale that their product is multiplied by.

    Args:
        factors: tensors by `layer.lora_A.weight` and `layer.lora_B.weight`.
        scaling: alpha / rank, times the strength.
    """
    total = Checksum(dtype)
    total.add_all(sorted(factors.items()))
    total.add_scaling(scaling)
    return total.hex()


def policy_checksums(base: Mapping[str, str], adapters: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what `get_weights_checksum` has to report of a server with exactly these weights and adapters.

    A network that is not in `adapters` has none: `UNKNOWN` is expected, so that an adapter of another run is found.

    Args:
        base, adapters: checksums by name of a network.
    """
    return {**base, **{name + FACTORS: (adapters or {}).get(name, UNKNOWN) for name in base}}


class BucketPlace(Struct, frozen=True):
    """Place of a tensor in a bucket; the fields are those of sglang's `FlattenedTensorMetadata`."""

    name: Text
    shape: Shape
    dtype: torch.dtype
    start_idx: Offset  # in bytes
    end_idx: Offset
    numel: Offset

    def __post_init__(self) -> None:
        size = torch.Size(self.shape).numel()
        if self.numel != size or self.end_idx - self.start_idx != size * self.dtype.itemsize:
            raise WireError(
                f"there are {self.end_idx - self.start_idx} bytes and numel {self.numel}, and shape and dtype have others"
            )


def buckets(layout: Mapping[str, Tensor], *, most_bytes: int) -> list[list[BucketPlace]]:
    """Return how tensors are laid out in buckets of at most `most_bytes`; a larger tensor has a bucket of its own.

    The tensors of a bucket have one dtype, so that each begins at a multiple of its item size.

    Args:
        layout: tensors by name, in the order in which they will be sent. Their values are not read.
    """
    parts: list[list[BucketPlace]] = []
    for name, tensor in layout.items():
        size, last = tensor.numel() * tensor.element_size(), parts[-1][-1] if parts else None
        if last is None or last.dtype != tensor.dtype or last.end_idx + size > most_bytes:
            parts.append([])
            last = None
        start = 0 if last is None else last.end_idx
        parts[-1].append(BucketPlace(name, tuple(tensor.shape), tensor.dtype, start, start + size, tensor.numel()))
    return parts


def flatten(places: Iterable[BucketPlace], tensors: Iterable[Tensor]) -> Tensor:
    """Return a bucket, uint8 `[bytes]`, on the device of its tensors."""
    return torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for _, t in zip(places, tensors, strict=True)])


class SharedBucket(Struct, frozen=True):
    """A bucket in a file that both sides see, or that a group broadcasts, for fluvial's own server.

    Args:
        push: name of the push; its buckets are staged together.
        index, count: number of the bucket, and of all buckets of the push.
        module: name of the network, with `FACTORS` where the tensors are those of its adapter.
        file: file, or name of the group.
        places: where each tensor lies in it.

    Raises:
        WireError: a tensor does not begin where the one before it ends.
    """

    push: Text
    index: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(ge=1, le=MOST_BUCKETS)]
    module: Text
    file: Text
    places: Annotated[list[BucketPlace], Meta(min_length=1, max_length=65536)]

    def __post_init__(self) -> None:
        if self.index >= self.count:
            raise WireError(f"index is {self.index}, expected at most {self.count - 1}")
        end = 0
        for number, place in enumerate(self.places):
            if place.start_idx != end:
                raise WireError(
                    f"places[{number}].start_idx is {place.start_idx}, expected {end}, where the last tensor ends"
                )
            end = place.end_idx

    def as_json(self) -> dict[str, Any]:
        """Return the bucket as a JSON value."""
        return to_builtins(self, enc_hook=str)


def open_shared_bucket(value: Any) -> SharedBucket:
    """Return the bucket of a JSON value; WireError if it is wrong."""

    def dtype(kind: type, name: Any) -> torch.dtype:
        if not isinstance(name, str) or name not in DTYPES:
            raise WireError(f"it is {str(name)[:40]!r}, expected one of {', '.join(DTYPES)}")
        return DTYPES[name][1]

    return convert(value, SharedBucket, hook=dtype)


def open_store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    """Return the store that the ranks of a group meet at; port 0 takes a free one. RunError if it cannot be reached."""
    with convert_errors(RunError, RuntimeError, OSError, says=f"the group's store at {address}:{port} cannot be reached"):
        wait = timedelta(seconds=TIMEOUT)
        return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=wait)


def own_address(host: str, port: int) -> str:
    """Return the address of this machine that another one reaches it at; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as udp:
        udp.connect(target)
        return str(udp.getsockname()[0])


class BroadcastGroup:
    """One rank of a group; rank 0 sends. It is made once all ranks have come.

    Args:
        store: see `open_store`.
        address: own address, at which the others connect.
        rank, size: number of this rank, and of all of them.
        name: name of the group within its store.

    Raises:
        RunError: a rank does not come.
    """

    def __init__(self, store: dist.TCPStore, address: str, *, rank: int, size: int, name: str) -> None:
        self.name, self.store = name, store
        gloo: Any = dist.ProcessGroupGloo  # torch's types know neither its options nor its operations
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=TIMEOUT)
        with convert_errors(RunError, RuntimeError, says=f"group {name} cannot be joined"):
            self._group = gloo(dist.PrefixStore(name, store), rank, size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send a tensor of the host to all ranks, or receive it in place; RunError if a rank is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with convert_errors(RunError, RuntimeError, says=f"group {self.name} has lost a rank"):
            self._group.broadcast([flat], options).wait()
