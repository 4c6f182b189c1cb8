"""Checkpoints: whole or not there at all, checked before they are used, and never unpickled.

A checkpoint is a folder `checkpoints/000040` with tensors (`torch.distributed.checkpoint`, one safetensors file a rank)
and `manifest.json`: counters, the run's fingerprint, package versions, and the size and SHA-256 of every file. How it
comes to be there at once, on a disk and behind a URL, is the business of `places`; older ones are removed only then.
"""

import errno
import hashlib
import io
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fluvial.engines.checkpoint.storage import MANIFEST, NAME, CheckpointStore, Draft, located, place
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp.world import World

FORMAT = 1

# A path of a disk, or an fsspec URL; what comes back is of the kind that was given.
Where = TypeVar("Where", bound=Path | str)


def save(
    folder: Where,
    state: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    update: int,
    fingerprint: dict[str, Any],
    world: World,
    keep: int,
) -> Where:
    """Write a checkpoint, and remove older ones but for `keep`, and later ones; every rank must take part.

    Memory on the host, on each rank: its shards, copied there from a GPU, and once more as the bytes of its file.

    Args:
        folder: of the checkpoints: a path, or an fsspec URL such as `s3://bucket/run`.
        state: tensors, sharded or not; every rank gives the same names.
        meta: anything JSON holds; only rank 0's is written.
        update: the number of updates done, which names the checkpoint.
        fingerprint: what a run that resumes from it must agree with.
        world: of the world.
        keep: how many to keep, at least 1.

    Raises:
        UsageError: the URL's protocol is not known, or needs a package that is not there.
        RunError: it could not be written (a full disk, say). Older checkpoints are untouched.
    """
    with world.agreed():
        home = place(folder)
    manifest = _account(update, fingerprint, meta)
    return type(folder)(_save(home, state, manifest, world, keep=keep, copy_ahead=True))


def save_async(
    folder: Where,
    state: dict[str, Tensor],
    meta: dict[str, Any],
    *,
    update: int,
    fingerprint: dict[str, Any],
    world: World,
    keep: int,
) -> Future[Where]:
    """Start what `save` does and go on: the state is copied to the host before this returns, and written by a thread.

    Ask for the future's result before the next save, and before the process ends: only then is the checkpoint there, and
    what went wrong is raised, on every rank alike. A process that dies before leaves the earlier checkpoints.

    Args:
        world: `world.background()`, made once: its collectives must not mix with those of the training that goes on.
        folder, state, meta, update, fingerprint, keep: as for `save`.

    Raises:
        UsageError: as `save`.
        RunError: the host has no room for the copy; or, by the result, as `save`.
    """
    assert world.group is not None
    with world.agreed():
        home = place(folder)
    with _told(world, _lost(home, f"{update:06d}")):
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = stager.stage(state)
        assert isinstance(copied, dict)  # not a future: it is asked to wait
        stager.close()
    manifest = _account(update, fingerprint, meta)
    writer = ThreadPoolExecutor(1, "checkpoint")
    future = writer.submit(lambda: type(folder)(_save(home, copied, manifest, world, keep=keep, copy_ahead=False)))
    writer.shutdown(wait=False)
    return future


def load(path: Path | str, state: dict[str, Tensor], *, fingerprint: dict[str, Any], world: World) -> dict[str, Any]:
    """Fill `state` in place from a checkpoint, after checking it, and return its meta; every rank must take part.

    The number of ranks may be another than the one that saved. Of files behind a URL a rank fetches what it needs.

    Raises:
        RunError: the checkpoint is damaged, or of another run. The message names what is wrong and the newest whole one.
    """
    with world.agreed():
        manifest = _verified(path, share=slice(world.rank, None, world.size))
        saved = manifest["fingerprint"]
        if different := sorted(k for k in {*saved, *fingerprint} if saved.get(k) != fingerprint.get(k)):
            changes = ", ".join(f"{name} {saved.get(name)!r} there, {fingerprint.get(name)!r} here" for name in different)
            raise RunError(f"checkpoint {path} is of another run: {changes}")
    home, name = located(path)
    unread = f"checkpoint {path} could not be read: {{reason}}"
    with TemporaryDirectory(prefix="fluvial-") as scratch:
        with _told(world, unread):
            reader = _Reader(home, name, manifest["files"], Path(scratch))
            held = reader.read_metadata().state_dict_metadata
        with world.agreed():
            if set(held) != set(state):
                raise RunError(
                    f"checkpoint {path} is of another model: it holds {len(held)} tensors, {len(set(held) & set(state))} "
                    f"of the {len(state)} expected"
                )
            for key, tensor in state.items():
                entry = held[key]
                assert isinstance(entry, TensorStorageMetadata)  # safetensors hold nothing else
                if entry.size != tensor.shape:
                    raise RunError(
                        f"checkpoint {path} is of another model: {key} has shape {list(entry.size)} there, "
                        f"{list(tensor.shape)} here"
                    )
                if entry.properties.dtype != tensor.dtype:
                    raise RunError(
                        f"checkpoint {path} is of another model: {key} is {entry.properties.dtype} there, "
                        f"{tensor.dtype} here"
                    )
                if sum(chunk.sizes.numel() for chunk in entry.chunks) != tensor.numel():
                    raise RunError(f"checkpoint {path} holds only a part of {key}")
        with _told(world, unread):
            dcp.load(state, storage_reader=reader)
    return manifest["meta"]


def listed(folder: Where) -> list[Where]:
    """Return the finished checkpoints of a folder or URL, oldest first.

    Raises:
        UsageError: the URL's protocol is not known, or needs a package that is not there.
    """
    home = place(folder)
    return [type(folder)(home.spelled(name)) for name in home.names()]


def verify(path: Path | str) -> dict[str, Any]:
    """Return a checkpoint's manifest after comparing every file with it.

    Raises:
        UsageError: there is no such folder.
        RunError: one of its files is missing, cut short or changed.
    """
    return _verified(path, share=slice(None))


def damage(path: Path | str, *, share: slice = slice(None)) -> str | None:
    """Return what is wrong with a checkpoint, or None.

    Args:
        path: folder or URL.
        share: of its tensor files, those that are read to the end, so that ranks can share them.
    """
    home, name = located(path)
    return _problem(home, name, share)


def _verified(path: Path | str, *, share: slice) -> dict[str, Any]:
    home, name = located(path)
    if home.kind(name) is None:
        raise UsageError(f"{path} is not a checkpoint: there is no such folder")
    problem = _problem(home, name, share)
    if problem is None:
        return _manifest(home, name)
    others = (other for other in reversed(home.names()) if other != name)
    whole = next((home.spelled(other) for other in others if _problem(home, other) is None), None)
    offer = f"the newest whole one is {whole}: use --resume-from {whole}" if whole else "there is no other whole one"
    raise RunError(f"checkpoint {path} is damaged ({problem}); {offer}")


def _problem(home: CheckpointStore, name: str, share: slice = slice(None)) -> str | None:
    """Return what is wrong with a checkpoint, reading only a share of its tensors to the end."""
    if home.kind(name) != "directory":
        return "it is a file"
    try:
        with home.open(name, MANIFEST) as stream:
            text = stream.read()
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, expected {FORMAT}"
        # Not only the seal: a 1e-5 that became 1E-5 is the same number, but not the same file.
        if text != _text(manifest) or manifest.pop("seal") != _digest(manifest):
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
    present = home.sizes(name)
    if home.holds_only_its_own() and (unknown := {*present} - {*expected, MANIFEST}):
        return f"{min(unknown)} does not belong to it"
    for file, (size, _) in expected.items():
        if file not in present:
            return f"{file} is missing"
        if present[file] != size:
            return f"{file} has {present[file]} bytes, expected {size}"
    for file in sorted(expected)[share]:
        with home.open(name, file) as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected[file][1]:
                return f"{file} was changed: its SHA-256 differs"
    return None


def _manifest(home: CheckpointStore, name: str) -> dict[str, Any]:
    with home.open(name, MANIFEST) as stream:
        return json.loads(stream.read())


def _account(update: int, fingerprint: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of what a manifest says beside its files, with the types that will be read back."""
    return json.loads(json.dumps({"format": FORMAT, "update": update, "fingerprint": fingerprint, "meta": meta}))


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _save(
    home: CheckpointStore, state: dict[str, Tensor], manifest: dict[str, Any], world: World, *, keep: int, copy_ahead: bool
) -> str:
    """Write a checkpoint and return how it is spelled."""
    name = f"{manifest['update']:06d}"
    lost = _lost(home, name)
    draft: Draft | None = None
    with _told(world, lost):
        if world.is_main:
            draft = home.draft(name)
    draft = world.gather_items(draft)[0]
    assert draft is not None
    try:
        with _told(world, lost):
            sheet = _Sheet(home, draft)
            writer = HuggingFaceStorageWriter(draft.folder, save_distributed=True)
            writer.fs, writer.sync_files = sheet, False  # the place brings its files to disk itself
            if not copy_ahead:  # its streams would be those of the thread's device, which is the first GPU for all ranks
                writer.per_thread_copy_ahead = 0
            dense = {key: tensor.contiguous() for key, tensor in state.items()}  # else safetensors refuses them
            dcp.save(dense, storage_writer=writer, process_group=world.group)
        written = {file: entry for ranks in world.gather_items(sheet.written) for file, entry in ranks.items()}
        with _told(world, lost):
            if world.is_main:
                present = home.sizes(draft.folder)
                for file, entry in written.items():
                    if present.get(file.removeprefix(draft.prefix)) != entry["bytes"]:
                        raise OSError(f"{file} is not there: all ranks must write to the same disk")
                manifest = {**manifest, "files": written}
                sealed = {**manifest, "seal": _digest(manifest)}
                home.publish(draft, name, _text(sealed))
    except RunError:
        if world.is_main:
            home.discard(draft)
        raise
    if world.is_main:
        with suppress(OSError):  # what cannot be removed now is there for longer, that is all
            # Later ones are of a branch that was left by resuming from an earlier checkpoint: this one is the newest now.
            names = home.names()
            mine = [other for other in names if int(other) <= manifest["update"]]
            for old in {*names} - {*mine[-keep:]}:
                home.remove(old)
    return home.spelled(name)


class _Sheet(FileSystem):
    """A draft as the library's writer sees it: notes the size and SHA-256 of each file while it is written."""

    def __init__(self, home: CheckpointStore, draft: Draft) -> None:
        self.home, self.draft = home, draft
        self.written: dict[str, dict[str, int | str]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        file = Path(path).name
        with self.home.create(self.draft, file) as stream:
            hashed = _Hashed(stream)
            yield hashed
        self.written[self.draft.prefix + file] = {"bytes": hashed.tell(), "sha256": hashed.digest.hexdigest()}

    def mkdir(self, path: Any) -> None:
        """Do nothing: the place makes its folders."""

    def exists(self, path: Any) -> bool:
        return False


class _Hashed(io.RawIOBase):
    """A stream for writing that knows the SHA-256 of what went through it. Closing it leaves the other one open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.stream.write(data)
        self.digest.update(data)
        self.count += len(data)
        return len(data)

    def tell(self) -> int:
        return self.count


class _Files(FileSystem):
    """A folder as the library's reader sees it: paths of files, wherever they are."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def ls(self, path: Any) -> list[str]:
        return self.paths


class _Reader(HuggingFaceStorageReader):
    """Reads a checkpoint's headers, and then only the files that hold something for this rank."""

    def __init__(self, home: CheckpointStore, name: str, files: dict[str, Any], scratch: Path) -> None:
        super().__init__(home.spelled(name))
        self.home, self.name, self.scratch = home, name, scratch
        self.files = {home.head(name, file, entry["bytes"], scratch): file for file, entry in files.items()}
        self.fs = _Files([*self.files])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for path in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self.home.body(self.name, self.files[path], self.scratch)
        return super().read_data(plan, planner)


def _lost(home: CheckpointStore, name: str) -> str:
    """Return the message of a failed save, but for its reason."""
    return f"checkpoint {home.spelled(name)} could not be saved: {{reason}}; earlier checkpoints are as they were"


@contextmanager
def _told(world: World, message: str) -> Iterator[None]:
    """Turn what goes wrong with files and services into a RunError with its `{reason}`, on every rank if on one."""
    with world.agreed():
        try:
            yield
        except (OSError, RuntimeError, MemoryError, dcp.CheckpointException, SafetensorError) as error:
            full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
            reason = "the disk is full" if full else (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise RunError(message.replace("{reason}", reason)) from error
