"""Files and folders of weights: names, reading and writing of tensors, and syncing to the disk."""

import json
import os
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fluvial.engines.errors import UsageError, convert_errors
from fluvial.models.digests import digest_tensors
from fluvial.models.protocol import Weights

MODEL = "diffusion_pytorch_model"  # diffusers' stem for the weights of a model
LORA = "pytorch_lora_weights.safetensors"  # diffusers' name for the weights of an adapter


def list_weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, as `from_pretrained` chooses them; other variants are left out.

    Raises:
        UsageError: there are none, or a file of the index is missing.
    """
    index = folder / f"{MODEL}.safetensors.index.json"
    if not index.is_file():
        names = [f"{MODEL}.safetensors"]
    else:
        with convert_errors(UsageError, ValueError, KeyError, TypeError, AttributeError, says=f"{index} cannot be read"):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UsageError(f"{folder} holds no weights: there is no {missing[0]}")
    return [folder / name for name in names]


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor in a model folder's safetensors, from the headers only.

    Raises:
        UsageError: there are no weight files, or one cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in list_weight_files(folder):
        with _open_file(file) as tensors:
            shapes.update((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
    return shapes


def read_weights(
    folder: Path, names: Container[str] | None = None, *, share: slice = slice(None)
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model folder's safetensors in the order of the names, one at a time; by default all.

    Args:
        folder: the folder.
        names: tensors to read.
        share: slice of these tensors, e.g. that of a rank.

    Raises:
        UsageError: there are no weight files, or one cannot be read.
    """
    file_of: dict[str, Path] = {}
    for file in list_weight_files(folder):
        with _open_file(file) as tensors:
            file_of.update((name, file) for name in tensors.keys() if names is None or name in names)  # noqa: SIM118
    for name in sorted(file_of)[share]:
        with _open_file(file_of[name]) as tensors:
            yield name, tensors.get_tensor(name)


def digest_weights(folder: Weights, *, share: slice = slice(None)) -> dict[str, str]:
    """Return the digest of each tensor of a model folder; it does not depend on the split into files.

    Args:
        folder: the folder, or several by name.
        share: slice of the tensors, e.g. that of a rank.

    Raises:
        UsageError: there are no weight files, or one cannot be read.
    """
    if isinstance(folder, Path):
        return digest_tensors(read_weights(folder, share=share))
    parts = {part: digest_weights(each, share=share) for part, each in folder.items()}
    return {f"{part}/{name}": digest for part, digests in parts.items() for name, digest in digests.items()}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with deterministic bytes and default permissions.

    `save_file` sets the mode 0600, and writes the metadata in an order that changes from process to process.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(stat.S_IMODE(mode))
    if metadata is None or len(metadata) < 2:
        return
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # padded with spaces, as safetensors does
            file.seek(8)
            file.write(text.ljust(size))


def sync(path: Path) -> None:
    """Write a file's data, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _open_file(file: Path) -> Iterator[Any]:
    """Open a safetensors file; errors inside the context become a UsageError."""
    problem = convert_errors(UsageError, SafetensorError, OSError, says=f"{file} cannot be read")
    with problem, safe_open(file, framework="pt") as tensors:
        yield tensors
