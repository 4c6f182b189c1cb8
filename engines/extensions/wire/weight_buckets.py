"""Transport of weights from a trainer to servers: checksums, buckets of tensors, and a gloo group that broadcasts them.

The group carries raw bytes: no pickles, no files.
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

# Dtypes of weights by their names in `dit_precision` of GET /v1/models.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FACTORS = ".lora"  # suffix of a network's name: the checksum of its adapter, which only fluvial's server reports
UNKNOWN = "not_found"  # checksum of a network or adapter that a server does not have
SHARED_FILES = "fluvial_shared_files"  # load_format of buckets in files, for fluvial's server
BROADCAST = "fluvial_broadcast"  # load_format of buckets that a group broadcasts
MOST_BUCKETS = 4096
TIMEOUT = 60.0  # of joining a group, and of a broadcast, in seconds
Offset = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
SCALING = "~scaling"  # name of an adapter's scale among its tensors; sorts after every other name


class Checksum:
    """Incremental SHA-256 of named tensors, equal to that of sglang's `get_weights_checksum`.

    It hashes each name and then its tensor, in ascending order of the names.

    Args:
        dtype: dtype that floating-point tensors are cast to.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype, self._last, self._digest = dtype, "", hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash the next tensor; ValueError if its name does not come after the last one."""
        if name <= self._last:
            raise ValueError(f"checksum: {name} comes after {self._last}, expected names in ascending order")
        plain = tensor.detach() if self.dtype is None or not tensor.is_floating_point() else tensor.detach().to(self.dtype)
        self._digest.update(name.encode())
        self._digest.update(read_bytes(plain))
        self._last = name

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hash the next tensors, in ascending order of their names."""
        for name, tensor in tensors:
            self.add(name, tensor)

    def add_scaling(self, scaling: float) -> None:
        """Hash the scale of an adapter, after all of its factors."""
        # As an integer, because floating-point tensors are cast.
        self.add(SCALING, torch.tensor(scaling, dtype=torch.float64).view(torch.int64))

    def hexdigest(self) -> str:
        """Return the digest of the tensors so far, in hexadecimal."""
        return self._digest.hexdigest()


def compute_checksum(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None) -> str:
    """Compute the `Checksum` of (name, tensor) pairs in ascending order of the names, one tensor at a time."""
    total = Checksum(dtype)
    total.add_all(tensors)
    return total.hexdigest()


def compute_adapter_checksum(factors: Mapping[str, Tensor], scaling: float, *, dtype: torch.dtype | None = None) -> str:
    """Compute the checksum of an adapter's factors and scale.

    Args:
        factors: tensors by `layer.lora_A.weight` and `layer.lora_B.weight`.
        scaling: factor of the product B A: strength * alpha / rank.
    """
    total = Checksum(dtype)
    total.add_all(sorted(factors.items()))
    total.add_scaling(scaling)
    return total.hexdigest()


def expect_checksums(base: Mapping[str, str], adapters: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the answer to `get_weights_checksum` of a server with exactly these weights and adapters.

    `UNKNOWN` is expected for a network without an adapter, so that an adapter of another run is detected.

    Args:
        base, adapters: checksums by name of the network.
    """
    return {**base, **{name + FACTORS: (adapters or {}).get(name, UNKNOWN) for name in base}}


class BucketPlace(Struct, frozen=True):
    """Place of a tensor in a bucket, with the fields of sglang's `FlattenedTensorMetadata`."""

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
                f"it has {self.end_idx - self.start_idx} bytes and numel {self.numel}, which differ from shape and dtype"
            )


def plan_buckets(layout: Mapping[str, Tensor], *, most_bytes: int) -> list[list[BucketPlace]]:
    """Lay out tensors in buckets of at most `most_bytes`; a larger tensor gets a bucket of its own.

    The tensors of a bucket share a dtype, so that each begins at a multiple of its item size.

    Args:
        layout: tensors by name, in the order of sending. Their values are not read.
    """
    buckets: list[list[BucketPlace]] = []
    for name, tensor in layout.items():
        size, last = tensor.numel() * tensor.element_size(), buckets[-1][-1] if buckets else None
        if last is None or last.dtype != tensor.dtype or last.end_idx + size > most_bytes:
            buckets.append([])
            last = None
        start = 0 if last is None else last.end_idx
        buckets[-1].append(BucketPlace(name, tuple(tensor.shape), tensor.dtype, start, start + size, tensor.numel()))
    return buckets


def flatten(places: Iterable[BucketPlace], tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the tensors of a bucket as bytes, uint8 `[bytes]`, on their device."""
    return torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for _, t in zip(places, tensors, strict=True)])


class SharedBucket(Struct, frozen=True):
    """Bucket in a shared file or in a broadcast, for fluvial's server.

    Args:
        push: name of the push; its buckets are staged together.
        index, count: index of the bucket, and number of buckets of the push.
        module: name of the network, with the suffix `FACTORS` for tensors of its adapter.
        file: path of the file, or name of the group.
        places: place of each tensor, without gaps.

    Raises:
        WireError: the places have gaps or overlap, or the index is out of range.
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
                    f"places[{number}].start_idx is {place.start_idx}, expected {end}, the end of the last tensor"
                )
            end = place.end_idx

    def as_json(self) -> dict[str, Any]:
        """Convert the bucket to JSON."""
        return to_builtins(self, enc_hook=str)


def parse_bucket(value: Any) -> SharedBucket:
    """Parse the JSON of a bucket; WireError if it is wrong."""

    def parse_dtype(kind: type, name: Any) -> torch.dtype:
        if not isinstance(name, str) or name not in DTYPES:
            raise WireError(f"it is {str(name)[:40]!r}, expected one of {', '.join(DTYPES)}")
        return DTYPES[name][1]

    return convert(value, SharedBucket, hook=parse_dtype)


def open_store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    """Open the store at which the ranks of a group meet; port 0 takes a free one. RunError if it cannot be reached."""
    with convert_errors(RunError, RuntimeError, OSError, says=f"the group's store at {address}:{port} cannot be reached"):
        wait = timedelta(seconds=TIMEOUT)
        return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=wait)


def find_local_address(host: str, port: int) -> str:
    """Return this machine's address on the route to a host; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as udp:
        udp.connect(target)
        return str(udp.getsockname()[0])


class BroadcastGroup:
    """One rank of a gloo group whose rank 0 sends. The constructor waits for all ranks.

    Args:
        store: see `open_store`.
        address: local address, at which the other ranks connect.
        rank, size: rank of this process, and size of the group.
        name: name of the group within its store.

    Raises:
        RunError: a rank does not join.
    """

    def __init__(self, store: dist.TCPStore, address: str, *, rank: int, size: int, name: str) -> None:
        self.name, self.store = name, store
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options and operations
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=TIMEOUT)
        with convert_errors(RunError, RuntimeError, says=f"group {name} cannot be joined"):
            self._group = gloo(dist.PrefixStore(name, store), rank, size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send a tensor on the host to all ranks, or receive it in place; RunError if a rank is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with convert_errors(RunError, RuntimeError, says=f"group {self.name} has lost a rank"):
            self._group.broadcast([flat], options).wait()
