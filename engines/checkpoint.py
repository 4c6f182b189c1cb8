"""Checkpoints: whole or not there at all, checked before they are used, and never unpickled.

A checkpoint is a folder `checkpoints/000040` with tensors (`torch.distributed.checkpoint`, one safetensors file a rank)
and `manifest.json`: counters, the run's fingerprint, package versions, and the size and SHA-256 of every file. It is
written under another name beside, synced to disk and renamed, and only then older ones are removed.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fluvial.engines.distributed import World
from fluvial.engines.errors import RunError, UsageError

FORMAT = 1
MANIFEST = "manifest.json"


def save(
    folder: Path,
    state: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    update: int,
    fingerprint: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Write a checkpoint, and remove older ones but for `keep`, and later ones; every rank must take part.

    Args:
        folder: of the checkpoints.
        state: tensors, sharded or not; every rank gives the same names.
        meta: anything JSON holds; only rank 0's is written.
        update: the number of updates done, which names the checkpoint.
        fingerprint: what a run that resumes from it must agree with.
        world: of the processes.
        keep: how many to keep, at least 1.

    Raises:
        RunError: it could not be written (a full disk, say). Older checkpoints are untouched.
    """
    final, partial = folder / f"{update:06d}", folder / f".partial-{update:06d}"
    with _saving(world, final):
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        with _saving(world, final), _quiet():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
        with _saving(world, final):
            if world.is_main:
                _seal(partial, {"format": FORMAT, "update": update, "fingerprint": fingerprint, "meta": meta})
                _replace(partial, final)
    except RunError:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if world.is_main:
        # Later ones are of a branch that was left by resuming from an earlier checkpoint: this one is the newest now.
        mine = [path for path in listed(folder) if int(path.name) <= update]
        for old in {*listed(folder)} - {*mine[-keep:]}:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path, state: dict[str, Tensor], *, fingerprint: dict[str, Any], world: World) -> dict[str, Any]:
    """Fill `state` in place from a checkpoint, after checking it, and return its meta; every rank must take part.

    Raises:
        RunError: the checkpoint is damaged, or of another run. The message names what is wrong and the newest whole one.
    """
    with world.agreed():
        manifest = verify(path)
        saved = manifest["fingerprint"]
        if different := sorted(k for k in {*saved, *fingerprint} if saved.get(k) != fingerprint.get(k)):
            changes = ", ".join(f"{name} {saved.get(name)!r} there, {fingerprint.get(name)!r} here" for name in different)
            raise RunError(f"checkpoint {path} is of another run: {changes}")
    reader = HuggingFaceStorageReader(str(path))
    with world.agreed(), _quiet():
        held = reader.read_metadata().state_dict_metadata
        if set(held) != set(state):
            raise RunError(
                f"checkpoint {path} is of another model: it holds {len(held)} tensors, {len(set(held) & set(state))} of the "
                f"{len(state)} expected"
            )
        for name, tensor in state.items():
            entry = held[name]
            assert isinstance(entry, TensorStorageMetadata)  # safetensors hold nothing else
            if entry.size != tensor.shape:
                raise RunError(
                    f"checkpoint {path} is of another model: {name} has shape {list(entry.size)} there, "
                    f"{list(tensor.shape)} here"
                )
    with _quiet():
        dcp.load(state, storage_reader=reader)
    return manifest["meta"]


def listed(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first."""
    _recover(folder)
    return sorted(path for path in folder.glob("[0-9]*") if re.fullmatch(r"\d{6,}", path.name) and path.is_dir())


def verify(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        UsageError: there is no such folder.
        RunError: one of its files is missing, cut short or changed.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a checkpoint: there is no such folder")
    problem = _problem(path)
    if problem is None:
        return json.loads((path / MANIFEST).read_text())
    whole = [other for other in listed(path.parent) if other != path and _problem(other) is None]
    offer = f"the newest whole one is {whole[-1]}: use --resume-from {whole[-1]}" if whole else "there is no other whole one"
    raise RunError(f"checkpoint {path} is damaged ({problem}); {offer}")


def _problem(path: Path) -> str | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, expected {FORMAT}"
        files, seal = manifest["files"], manifest.pop("seal")
        if seal != _digest(manifest):
            return f"{MANIFEST} was changed"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, OSError):
        return f"{MANIFEST} cannot be read"
    if unknown := {file.name for file in path.iterdir()} - {*files, MANIFEST}:
        return f"{min(unknown)} does not belong to it"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}"
        if _sha256(file) != expected["sha256"]:
            return f"{name} was changed: its SHA-256 differs"
    return None


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder's files, and bring all of it to disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    manifest["seal"] = _digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for path in [*files, folder / MANIFEST, folder]:
        _sync(path)


def _replace(partial: Path, final: Path) -> None:
    """Give a written checkpoint its name; one that has the name already is put back if that fails."""
    aside = final.with_name(f".replaced-{final.name}")
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(partial, final)
        _sync(final.parent)
    except OSError:
        _recover(final.parent)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Put back checkpoints that were moved aside for a replacement that never came: the process was killed in between."""
    for aside in folder.glob(".replaced-*"):
        final = folder / aside.name.removeprefix(".replaced-")
        if not final.exists():
            os.rename(aside, final)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _saving(world: World, path: Path) -> Iterator[None]:
    """Turn what goes wrong in saving into a RunError, on every rank if on one."""
    with world.agreed():
        try:
            yield
        except (OSError, RuntimeError, dcp.CheckpointException, SafetensorError) as error:
            full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
            reason = "the disk is full" if full else (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise RunError(
                f"checkpoint {path} could not be saved: {reason}; earlier checkpoints are as they were"
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's own deprecation notices from the person."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
