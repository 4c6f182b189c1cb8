"""Checkpoints: complete or absent, verified before they are loaded, never unpickled.

A checkpoint is a folder such as `checkpoints/000040`. It holds tensors (`torch.distributed.checkpoint`, one safetensors file
per rank) and `manifest.json` with the run's fingerprint, its metadata, and the size and SHA-256 of every file. `storage.py`
makes it visible atomically, on a disk and behind a URL. Older checkpoints are removed only afterwards.
"""

import errno
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.run.checkpoint.storage import MANIFEST, NAME, PROBE, CheckpointStore, Draft, locate, open_store

FORMAT = 1

# A path on a disk or an fsspec URL. Functions return the type of their argument.
Folder = TypeVar("Folder", bound=Path | str)


@collective
def save(
    folder: Folder,
    state: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    update: int,
    fingerprint: dict[str, Any],
    world: World,
    keep: int,
    spare: int | None = None,
    copy_ahead: bool = True,
) -> Folder:
    """Write a checkpoint, then remove later ones and all but the newest `keep`.

    Host memory per rank: a copy of its shards, and the bytes of its file.

    Args:
        folder: folder of the checkpoints: a path, or an fsspec URL such as `s3://bucket/run`.
        state: tensors, sharded or not, with the same names on every rank.
        meta: metadata, as values of JSON; those of rank 0 are written.
        update: number of updates done, which names the checkpoint.
        fingerprint: settings that a resumed run must share.
        world: process group that saves.
        keep: number of checkpoints to keep, at least 1.
        spare: update of one more checkpoint to keep.
        copy_ahead: copy tensors to the host on side streams of the current device; False in a thread, whose device differs.

    Raises:
        UsageError: the URL's protocol is unknown, or a package for it is missing.
        RunError: the checkpoint could not be written, e.g. because the disk is full. Earlier ones are unchanged.
    """
    with world.agreed():
        store = open_store(folder)
    name = f"{update:06d}"
    failed = _format_failure(store, name)
    draft: Draft | None = None
    with _raise_on_every_rank(world, failed):
        if world.is_main:
            draft = store.create_draft(name)
    draft = world.gather_items(draft)[0]
    assert draft is not None
    try:
        with _raise_on_every_rank(world, failed):
            files = DraftFiles(store, draft)
            writer = HuggingFaceStorageWriter(draft.folder, save_distributed=True)
            writer.fs, writer.sync_files = files, False  # the storage syncs its files itself
            if not copy_ahead:
                writer.per_thread_copy_ahead = 0
            dense = {key: tensor.contiguous() for key, tensor in state.items()}  # as safetensors demands
            dcp.save(dense, storage_writer=writer, process_group=world.group)
        written = {file: entry for ranks in world.gather_items(files.written) for file, entry in ranks.items()}
        with _raise_on_every_rank(world, failed):
            if world.is_main:
                present = store.list_sizes(draft.folder)
                for file, entry in written.items():
                    if present.get(file.removeprefix(draft.prefix)) != entry["bytes"]:
                        raise OSError(f"{file} is not there: all ranks must write to the same disk")
                manifest = {"format": FORMAT, "update": update, "fingerprint": fingerprint, "meta": meta, "files": written}
                manifest = json.loads(json.dumps(manifest))  # the seal is computed over JSON's types
                store.publish(draft, name, _serialize({**manifest, "seal": _digest(manifest)}))
    except RunError:
        if world.is_main:
            store.discard(draft)
        raise
    if world.is_main:
        with suppress(OSError):  # a later save tries again
            # Later ones belong to a branch that was abandoned by resuming from an earlier checkpoint.
            names = store.list_names()
            mine = [other for other in names if int(other) <= update]
            for old in {*names} - {*mine[-keep:]} - {other for other in mine if int(other) == spare}:
                store.remove(old)
    return type(folder)(store.spell(name))


def save_async(
    folder: Folder,
    state: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    update: int,
    fingerprint: dict[str, Any],
    world: World,
    keep: int,
    spare: int | None = None,
) -> Future[Folder]:
    """Copy the state to the host, and write the checkpoint in a thread while training continues.

    Get the future's result before the next save and before the process ends: only then is the checkpoint known to exist, and
    errors are raised, on all ranks. If the process dies earlier, the earlier checkpoints remain.

    Args:
        world: `world.background()`, created once, because its collectives must not mix with those of training.
        folder, state, meta, update, fingerprint, keep, spare: see `save`.

    Raises:
        UsageError: see `save`.
        RunError: the host has no memory for the copy. Other errors of `save` are raised by the result.
    """
    assert world.group is not None
    with world.agreed():
        store = open_store(folder)
    with _raise_on_every_rank(world, _format_failure(store, f"{update:06d}")):
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = stager.stage(state)
        assert isinstance(copied, dict)  # not a future: staging is synchronous
        stager.close()
    options: dict[str, Any] = {"update": update, "fingerprint": fingerprint, "world": world, "keep": keep, "spare": spare}
    write = partial(save, folder, copied, deepcopy(meta), copy_ahead=False, **options)
    writer = ThreadPoolExecutor(1, "checkpoint")
    future = writer.submit(write)
    writer.shutdown(wait=False)
    return future


@collective
def read_manifest(path: Path | str, *, world: World) -> dict[str, Any]:
    """Read a checkpoint's manifest, and no other files; raises as `load`."""
    with world.agreed():
        manifest = verify(path, share=slice(0))
    return manifest


@collective
def load(
    path: Path | str,
    state: dict[str, Tensor],
    *,
    fingerprint: dict[str, Any],
    world: World,
    saved: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Verify a checkpoint, fill `state` from it in place, and return its metadata.

    The number of ranks may differ from that of the save. From a URL, each rank fetches only the files it needs.

    Args:
        path: folder or URL of the checkpoint.
        state: tensors, sharded or not, with the names, shapes and dtypes of the checkpoint.
        fingerprint: settings of this run.
        saved: settings of the checkpoint's run under their present names; by default those in the manifest.
        world: process group that loads.

    Raises:
        UsageError: there is no such checkpoint, or it is of another run.
        RunError: it is damaged, or of another model. The message gives the reason and names the newest whole checkpoint.
    """
    with world.agreed():
        manifest = verify(path, share=slice(world.rank, None, world.size))
        saved = manifest["fingerprint"] if saved is None else saved
        if different := sorted(k for k in {*saved, *fingerprint} if saved.get(k) != fingerprint.get(k)):
            changes = ", ".join(f"`{name}` {saved.get(name)!r} there, {fingerprint.get(name)!r} here" for name in different)
            advice = "resume with the settings that it was saved with, or start a run in another folder"
            raise UsageError(f"checkpoint {path} is of another run: {changes}; {advice}")
    store, name = locate(path)
    unread, other = f"checkpoint {path} could not be read: {{reason}}", f"checkpoint {path} is of another model"
    with TemporaryDirectory(prefix="fluvial-") as scratch:
        with _raise_on_every_rank(world, unread):
            reader = TensorFiles(store, name, manifest["files"], Path(scratch))
            stored = reader.read_metadata().state_dict_metadata
        with world.agreed():
            if set(stored) != set(state):
                shared = len(set(stored) & set(state))
                raise RunError(f"{other}: it holds {len(stored)} tensors, {shared} of the {len(state)} expected")
            for key, tensor in state.items():
                entry = stored[key]
                assert isinstance(entry, TensorStorageMetadata)  # safetensors hold nothing else
                if entry.size != tensor.shape:
                    raise RunError(f"{other}: {key} has shape {list(entry.size)} there, {list(tensor.shape)} here")
                if entry.properties.dtype != tensor.dtype:
                    raise RunError(f"{other}: {key} is {entry.properties.dtype} there, {tensor.dtype} here")
                if sum(chunk.sizes.numel() for chunk in entry.chunks) != tensor.numel():
                    raise RunError(f"checkpoint {path} holds only a part of {key}")
        with _raise_on_every_rank(world, unread):
            dcp.load(state, storage_reader=reader)
    return manifest["meta"]


def read(path: Path | str, wanted: Callable[[str], bool], *, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify a checkpoint, and return some of its tensors, unsharded and on the CPU, and its manifest.

    The run that wrote it may still be training, on any number of ranks.

    Args:
        path: folder or URL of the checkpoint.
        wanted: predicate of the names of the tensors to read.
        world: process group that reads; each rank reads all.

    Raises:
        UsageError: there is no such checkpoint.
        RunError: the checkpoint is damaged, or was removed meanwhile.
    """
    with world.agreed():
        manifest = verify(path, share=slice(world.rank, None, world.size), resumes=False)
    store, name = locate(path)
    with (
        TemporaryDirectory(prefix="fluvial-") as scratch,
        _raise_on_every_rank(world, f"checkpoint {path} could not be read: {{reason}}; the run may have removed it"),
    ):
        files = TensorFiles(store, name, manifest["files"], Path(scratch))
        state: dict[str, Tensor] = {}
        for key, entry in files.read_metadata().state_dict_metadata.items():
            if wanted(key):
                assert isinstance(entry, TensorStorageMetadata)
                state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(state, storage_reader=files)
    return state, manifest


def list_checkpoints(folder: Folder, *, recover: bool = True) -> list[Folder]:
    """Return the finished checkpoints of a folder or URL, oldest first.

    Args:
        folder: folder of the checkpoints.
        recover: restore checkpoints that a killed run was replacing. Only the run itself may do so.

    Raises:
        UsageError: the URL's protocol is unknown, or a package for it is missing.
    """
    store = open_store(folder)
    return [type(folder)(store.spell(name)) for name in store.list_names(recover=recover)]


def list_newest_first(folders: Sequence[Path | str], *, recover: bool = True) -> list[Path | str]:
    """Return the finished checkpoints of several folders, newest first; for equal updates in the order of the folders."""
    numbered = [(path, int(locate(path)[1])) for folder in folders for path in list_checkpoints(folder, recover=recover)]
    return [path for path, _ in sorted(numbered, key=lambda one: -one[1])]


@collective
def find_newest_whole(
    folders: Sequence[Path | str], *, world: World, skipped: Callable[[str], None] = lambda line: None
) -> Path | str | None:
    """Find the newest checkpoint that is not damaged; None if there is no checkpoint.

    Args:
        folders: folders or URLs of a run's checkpoints.
        skipped: called with a line for each damaged checkpoint.

    Raises:
        RunError: all are damaged.
    """
    with world.agreed():
        mine = list_newest_first(folders) if world.is_main else []
    candidates = world.gather_items(mine)[0]
    for path in candidates:
        with world.agreed():
            problem = find_damage(path, share=slice(world.rank, None, world.size))
        problems = [one for one in world.gather_items(problem) if one is not None]
        if not problems:
            return path
        skipped(f"skipped: checkpoint {path} is damaged ({problems[0]})")
    if candidates:
        raise RunError(f"checkpoint {candidates[0]} is damaged, and there is no other whole one")
    return None


@collective
def check_writable(folder: Path | str, *, world: World) -> None:
    """Write a small file to the storage of checkpoints from each rank, and remove it.

    Raises:
        UsageError: the URL's protocol is unknown, or a package for it is missing; a rank cannot write, or ranks write to
            different disks.
    """
    with world.agreed():
        store = open_store(folder)
    try:
        with world.agreed():
            try:
                store.probe(str(world.rank))
            except OSError as error:
                reason = str(error) if error.errno is None else error.strerror
                raise UsageError("checkpoint.folder", str(folder), hint=f"it cannot be written ({reason})") from error
        with world.agreed():
            if len(store.list_sizes(PROBE.folder)) < world.size:
                raise UsageError("checkpoint.folder", str(folder), "a disk or a service that all ranks write to")
        world.gather_items(None)  # barrier: the files are removed below
    finally:
        if world.is_main:
            store.discard(PROBE)


def remove_all(folder: Path | str) -> None:
    """Remove the checkpoints of a folder, as far as possible."""
    store = open_store(folder)
    with suppress(OSError):
        for name in store.list_names():
            store.remove(name)


def find_damage(path: Path | str, *, share: slice = slice(None)) -> str | None:
    """Describe the damage of a checkpoint; None if it is whole.

    Args:
        path: folder or URL of the checkpoint.
        share: slice of its tensor files to hash, so that ranks can share the work.
    """
    return _find_damage(*locate(path), share)


def verify(path: Path | str, *, share: slice = slice(None), resumes: bool = True) -> dict[str, Any]:
    """Compare a share of a checkpoint's files with its manifest, and return the manifest.

    Args:
        share: slice of its tensor files to hash.
        resumes: whether the checkpoint's own run calls this, which may recover other checkpoints, see `list_checkpoints`.

    Raises:
        UsageError: there is no such folder.
        RunError: a file is missing, truncated or changed; the message names the newest whole checkpoint.
    """
    store, name = locate(path)
    if store.find_kind(name) is None:
        raise UsageError(f"{path} is not a checkpoint: there is no such folder")
    problem = _find_damage(store, name, share)
    if problem is None:
        with store.open(name, MANIFEST) as stream:
            return json.loads(stream.read())
    others = (other for other in reversed(store.list_names(recover=resumes)) if other != name)
    whole = next((store.spell(other) for other in others if _find_damage(store, other) is None), None)
    advice = f"set checkpoint.resume_from to {whole}" if resumes else "name that one"
    offer = f"the newest whole one is {whole}: {advice}" if whole else "there is no other whole one"
    raise RunError(f"checkpoint {path} is damaged ({problem}); {offer}")


def _find_damage(store: CheckpointStore, name: str, share: slice = slice(None)) -> str | None:
    """Describe the damage of a checkpoint; None if it is whole. Only a share of its tensor files is hashed."""
    if store.find_kind(name) != "directory":
        return "it is a file"
    try:
        with store.open(name, MANIFEST) as stream:
            text = stream.read()
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, expected {FORMAT}"
        # The text is compared too: 1E-5 for 1e-5 is the same value, but not the same file.
        if text != _serialize(manifest) or manifest.pop("seal") != _digest(manifest):
            return f"{MANIFEST} was changed"
        expected = {file: (entry["bytes"], entry["sha256"]) for file, entry in manifest["files"].items()}
        if not (isinstance(manifest["fingerprint"], dict) and isinstance(manifest["meta"], dict)):
            return f"{MANIFEST} is of another program"
        if NAME.fullmatch(name) and manifest["update"] != int(name):
            return f"{MANIFEST} is of update {manifest['update']}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return f"{MANIFEST} cannot be read"
    present = store.list_sizes(name)
    if store.holds_only_its_own and (unknown := {*present} - {*expected, MANIFEST}):
        return f"{min(unknown)} does not belong to it"
    for file, (size, _) in expected.items():
        if file not in present:
            return f"{file} is missing"
        if present[file] != size:
            return f"{file} has {present[file]} bytes, expected {size}"
    for file in sorted(expected)[share]:
        with store.open(name, file) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected[file][1]:
                return f"{file} was changed: its SHA-256 differs"
    return None


def _serialize(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _format_failure(store: CheckpointStore, name: str) -> str:
    """Return the message of a failed save, with a placeholder for the reason."""
    return f"checkpoint {store.spell(name)} could not be saved: {{reason}}; earlier checkpoints are unchanged"


@contextmanager
def _raise_on_every_rank(world: World, message: str) -> Iterator[None]:
    """Turn errors of files and services into a RunError; if one rank fails, all ranks raise."""
    with world.agreed():
        try:
            yield
        except (OSError, RuntimeError, MemoryError, dcp.CheckpointException, SafetensorError) as error:
            full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
            reason = "the disk is full" if full else (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise RunError(message.replace("{reason}", reason)) from error


class DraftFiles(FileSystem):
    """Adapter of a draft for torch's writer; records the size and SHA-256 of each file while it is written."""

    def __init__(self, store: CheckpointStore, draft: Draft) -> None:
        self.store, self.draft = store, draft
        self.written: dict[str, dict[str, int | str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        file = Path(path).name
        with self.store.create(self.draft, file) as stream:
            hashed = HashingStream(stream)
            yield hashed
        self.written[self.draft.prefix + file] = {"bytes": hashed.tell(), "sha256": hashed.digest.hexdigest()}

    def mkdir(self, path: Any) -> None:
        """Do nothing: the storage creates its folders."""

    def exists(self, path: Any) -> bool:
        return False


class HashingStream(io.RawIOBase):
    """Writable stream that hashes its data. Closing it leaves the underlying stream open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.stream.write(data)
        self.digest.update(data)
        self.count += len(data)
        return len(data)

    def tell(self) -> int:
        return self.count


class ReadFiles(FileSystem):
    """Adapter for torch's reader: a folder that lists files from any place."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def ls(self, path: Any) -> list[str]:
        return self.paths


class TensorFiles(HuggingFaceStorageReader):
    """Reader of a checkpoint: all headers, then only the files with tensors for this rank."""

    def __init__(self, store: CheckpointStore, name: str, files: dict[str, Any], scratch: Path) -> None:
        super().__init__(store.spell(name))
        self.store, self.name, self.scratch = store, name, scratch
        self.files = {store.fetch_header(name, file, entry["bytes"], scratch): file for file, entry in files.items()}
        self.fs = ReadFiles([*self.files])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for path in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self.store.fetch_body(self.name, self.files[path], self.scratch)
        return super().read_data(plan, planner)
