"""Digests of the bytes of files and tensors, for keys of caches and fingerprints."""

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import uint8 as byte

from fluvial.models.images import READING


def digest_file(file: Path | bytes) -> str:
    """Return the SHA-256 of a file or of bytes. A process reads each file once, as long as it does not change."""
    if isinstance(file, bytes):
        return hashlib.sha256(file).hexdigest()
    stat = file.stat()
    return _digest_file(file.absolute(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=2**17)
def _digest_file(file: Path, *state: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the `digest_tensor` of each tensor by name. One tensor at a time is on the host."""
    return {name: digest_tensor(tensor) for name, tensor in tensors}


def digest_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, as sglang's `update_weights_from_tensor_checker`."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)!r}".encode())
    digest.update(read_bytes(tensor))
    return digest.hexdigest()


def read_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(byte).numpy().data


def join_digests(digests: Mapping[str, str]) -> str:
    """Return one digest of several, in 16 hexadecimal digits; it does not depend on their order."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


def describe_code(thing: Any) -> str:
    """Return the name of a function or a class, with a digest of its source if Python can find it."""
    inner = inspect.unwrap(thing)
    name = f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    try:
        return f"{name} {digest_file(inspect.getsource(inner).encode())}"
    except (OSError, TypeError):
        return name


@cache
def describe_encoding_code() -> str:
    """Return the versions of the code that opens and encodes prompts and images."""
    return " ".join([READING, *(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers"))])
