"""Weights between a trainer and servers: checksums, and the buckets that tensors travel in. Nothing here does I/O."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.wire.errors import WireError
from fluvial.engines.wire.fields import Fields, shown
from fluvial.engines.wire.tensors import DTYPES, shape_of

# What a server calls the dtype of its weights (`dit_precision` of GET /v1/models).
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FACTORS = ".lora"  # after the name of a network: the checksum of its adapter, which only fluvial's own server reports
UNKNOWN = "not_found"  # checksum of a network that a server does not have
SHARED_FILES = "fluvial_shared_files"  # load_format of buckets in files, which fluvial's own server takes
MOST_BUCKETS, MOST_TENSORS = 4096, 65536
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
        """Take the next tensor.

        Raises:
            ValueError: its name does not come after the last one.
        """
        if name <= self._last:
            raise ValueError(f"checksum: {name} comes after {self._last}, expected names in ascending order")
        plain = tensor.detach() if self.dtype is None or not tensor.is_floating_point() else tensor.detach().to(self.dtype)
        self._digest.update(name.encode())
        self._digest.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._last = name

    def hex(self) -> str:
        """Return the digest of the tensors so far."""
        return self._digest.hexdigest()


def checksum(tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None) -> str:
    """Return the `Checksum` of (name, tensor) in the order of the names. One tensor at a time is held."""
    found = Checksum(dtype)
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.hex()


def adapter_checksum(factors: Mapping[str, Tensor], scaling: float, *, dtype: torch.dtype | None = None) -> str:
    """Return the checksum of an adapter's factors and of the scale that their product is multiplied by.

    Args:
        factors: tensors by `layer.lora_A.weight` and `layer.lora_B.weight`.
        scaling: alpha / rank, times the strength.
        dtype: see `Checksum`.
    """
    scale = torch.tensor(scaling, dtype=torch.float64).view(torch.int64)  # as an integer, no dtype changes it
    return checksum([*((name, factors[name]) for name in sorted(factors)), (SCALING, scale)], dtype=dtype)


class Place(NamedTuple):
    """Place of a tensor in a bucket; the fields are those of sglang's `FlattenedTensorMetadata`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int  # in bytes
    end_idx: int
    numel: int


def buckets(layout: Mapping[str, Tensor], *, most_bytes: int) -> list[list[Place]]:
    """Return how tensors are laid out in buckets of at most `most_bytes`; a larger tensor has a bucket of its own.

    The tensors of a bucket have one dtype, so that each begins at a multiple of its item size.

    Args:
        layout: tensors by name, in the order in which they will be sent. Their values are not read.
        most_bytes: bytes per bucket.
    """
    found: list[list[Place]] = []
    for name, tensor in layout.items():
        size, last = tensor.numel() * tensor.element_size(), found[-1][-1] if found else None
        if last is None or last.dtype != tensor.dtype or last.end_idx + size > most_bytes:
            found.append([])
            last = None
        start = 0 if last is None else last.end_idx
        found[-1].append(Place(name, tuple(tensor.shape), tensor.dtype, start, start + size, tensor.numel()))
    return found


def flattened(places: Iterable[Place], tensors: Iterable[Tensor]) -> Tensor:
    """Return a bucket, uint8 `[bytes]`, on the device of its tensors."""
    return torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for _, t in zip(places, tensors, strict=True)])


@dataclass(frozen=True)
class SharedBucket:
    """A bucket in a file that both sides see, for fluvial's own server.

    Args:
        push: name of the push; its buckets are staged together.
        index, count: number of the bucket, and of all buckets of the push.
        module: name of the network.
        file: path of the file.
        places: where each tensor lies in it.
    """

    push: str
    index: int
    count: int
    module: str
    file: str
    places: list[Place]

    def as_json(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        places = [{**place._asdict(), "shape": list(place.shape), "dtype": str(place.dtype)} for place in self.places]
        return {**vars(self), "places": places}


def shared_bucket(value: Any) -> SharedBucket:
    """Return a bucket of the other side, each tensor within the file's first bytes and none over another.

    Raises:
        WireError: it is wrong.
    """
    fields = Fields(value)
    push, module, file = (_text(fields, name) for name in ("push", "module", "file"))
    count = _integer(fields, "count", low=1, high=MOST_BUCKETS)
    index = _integer(fields, "index", low=0, high=count - 1)
    listed = value.get("places")
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_TENSORS:
        raise WireError(f"places is {shown(listed)}, expected a list of 1 to {MOST_TENSORS} tensors")
    places, end = list[Place](), 0
    for number, each in enumerate(listed):
        place = _place(Fields(each, f"places[{number}]"))
        if place.start_idx != end:
            raise WireError(f"places[{number}].start_idx is {place.start_idx}, expected {end}, where the last tensor ends")
        places.append(place)
        end = place.end_idx
    return SharedBucket(push, index, count, module, file, places)


def _place(fields: Fields) -> Place:
    dtype = DTYPES.get(_text(fields, "dtype"), (None, None))[1]
    if dtype is None:
        raise WireError(f"{fields.name('dtype')} is {shown(fields.value['dtype'])}, expected one of {', '.join(DTYPES)}")
    shape = tuple(shape_of(fields.value.get("shape"), fields.where))
    start, end, numel = (_integer(fields, name, low=0, high=2**62) for name in ("start_idx", "end_idx", "numel"))
    size = torch.Size(shape).numel()
    if numel != size or end - start != size * dtype.itemsize:
        raise WireError(f"{fields.where} has {end - start} bytes and numel {numel}, and its shape and dtype have others")
    return Place(_text(fields, "name"), shape, dtype, start, end, numel)


def _text(fields: Fields, name: str) -> str:
    text = fields.text(name, most=4096)
    if not text:
        raise WireError(f"{fields.name(name)} is missing")
    return text


def _integer(fields: Fields, name: str, *, low: int, high: int) -> int:
    number = fields.integer(name, low=low, high=high)
    if number is None:
        raise WireError(f"{fields.name(name)} is missing")
    return number
