"""Storage of checkpoints: a folder on a disk, or one behind an fsspec URL such as `s3://bucket/run`.

Both give the same guarantee. If a save is killed at any moment, every checkpoint that was listed before stays whole, and a
new one is listed only when it is whole. A disk has an atomic rename, so a checkpoint is written under another name first. A
bucket has none, so the manifest, written last and in one request, makes a checkpoint visible.
"""

import io
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.files import sync

MANIFEST = "manifest.json"
NAME = re.compile(r"\d{6,}")


class Draft(NamedTuple):
    """Location of files that are written but do not belong to a checkpoint yet."""

    folder: str  # within the storage
    prefix: str  # prefix of the files' names in the checkpoint: empty, or a folder and a slash


PROBE = Draft(".partial-probe", "")  # for a trial whether the storage can be written


@dataclass(frozen=True)
class CheckpointStore(ABC):
    """A folder of checkpoints.

    Methods take names of checkpoints and of their files, and raise OSError if the disk or the service fails.
    """

    fs: AbstractFileSystem
    path: str  # as `fs` spells it
    spelling: str  # as the user spells it, up to a checkpoint's name
    holds_only_its_own: ClassVar[bool] = True  # whether a killed save never leaves files in another checkpoint's folder

    def spell(self, name: str) -> str:
        """Return a checkpoint's path or URL in the user's spelling."""
        return self.spelling + name

    def find_kind(self, name: str) -> str | None:
        """Return "directory" or "file", or None if nothing has this name."""
        try:
            return self._call(self.fs.info, self._join(name))["type"]
        except FileNotFoundError:
            return None

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file of a checkpoint or a draft, at any depth."""
        start = self._join(folder)
        infos = self._call(self.fs.find, start, detail=True)
        return {path.removeprefix(f"{start}/"): int(info["size"]) for path, info in infos.items()}

    def open(self, name: str, file: str) -> io.BufferedIOBase:
        """Open a file of a checkpoint for reading."""
        return self._call(self.fs.open, self._join(name, file), "rb")

    def probe(self, file: str) -> None:
        """Write a small file to the draft `PROBE`."""
        self._call(self.fs.makedirs, self._join(PROBE.folder), exist_ok=True)
        with self.create(PROBE, file) as stream:
            stream.write(b"fluvial")

    @abstractmethod
    def list_names(self, *, recover: bool = True) -> list[str]:
        """Return the finished checkpoints, oldest first.

        Args:
            recover: restore checkpoints that a killed run was replacing. Only the run itself may do so.
        """

    @abstractmethod
    def create_draft(self, name: str) -> Draft:
        """Remove files that killed saves left, and create a draft of a checkpoint. Only rank 0 calls it."""

    @abstractmethod
    def create(self, draft: Draft, file: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file of a draft for writing; it is durable when the context ends."""

    @abstractmethod
    def publish(self, draft: Draft, name: str, manifest: bytes) -> None:
        """Make a draft the checkpoint of this name, replacing an earlier one. Only rank 0 calls it."""

    @abstractmethod
    def discard(self, draft: Draft) -> None:
        """Remove a draft that failed, as far as possible."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a checkpoint, as far as possible; it is unlisted before its first file is removed."""

    @abstractmethod
    def fetch_header(self, name: str, file: str, size: int, scratch: Path) -> str:
        """Fetch the safetensors header of a file of `size` bytes, and return its local path."""

    @abstractmethod
    def fetch_body(self, name: str, file: str, scratch: Path) -> None:
        """Fetch the rest of the file to the path that `fetch_header` returned."""

    def _join(self, *names: str) -> str:
        return "/".join((self.path.rstrip("/"), *names))

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the filesystem, and raise OSError if it fails."""
        self.fs.invalidate_cache()  # to see files of other ranks
        try:
            return call(*args, **options)
        except OSError:
            raise
        except Exception as error:  # services raise other exceptions, e.g. for missing credentials
            raise OSError(f"{self.spelling}: {str(error) or type(error).__name__}") from error


class LocalStore(CheckpointStore):
    """A folder on a disk. A checkpoint is written under another name, synced to the disk and renamed."""

    def list_names(self, *, recover: bool = True) -> list[str]:
        if recover:
            self._recover()
        names = (path.name for path in Path(self.path).glob("[0-9]*") if path.is_dir())
        return sorted((name for name in names if NAME.fullmatch(name)), key=int)

    def create_draft(self, name: str) -> Draft:
        root = Path(self.path)
        if not root.is_dir():
            root.mkdir(parents=True)
            sync(root.parent)
        self._recover()
        for leftover in (path for kind in ("partial", "removed", "replaced") for path in root.glob(f".{kind}-*")):
            _delete(leftover)
        draft = Draft(f".partial-{name}", "")
        (root / draft.folder).mkdir()
        return draft

    @contextmanager
    def create(self, draft: Draft, file: str) -> Iterator[IO[bytes]]:
        folder = Path(self.path, draft.folder)
        folder.mkdir(parents=True, exist_ok=True)  # on another machine, the folder of rank 0 may not be visible yet
        with (folder / file).open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, draft: Draft, name: str, manifest: bytes) -> None:
        with self.create(draft, MANIFEST) as stream:
            stream.write(manifest)
        partial, final, aside = (Path(self.path, part) for part in (draft.folder, name, f".replaced-{name}"))
        sync(partial)
        if os.path.lexists(final):
            os.rename(final, aside)
        try:
            os.rename(partial, final)
            sync(final.parent)
        except OSError:
            self._recover()
            raise
        _delete(aside)

    def discard(self, draft: Draft) -> None:
        _delete(Path(self.path, draft.folder))

    def remove(self, name: str) -> None:
        gone = Path(self.path, f".removed-{name}")
        with suppress(OSError):
            os.rename(Path(self.path, name), gone)
            _delete(gone)

    def fetch_header(self, name: str, file: str, size: int, scratch: Path) -> str:
        return self._join(name, file)

    def fetch_body(self, name: str, file: str, scratch: Path) -> None:
        return

    def _recover(self) -> None:
        """Restore checkpoints that a killed process had moved aside to replace them."""
        for aside in Path(self.path).glob(".replaced-*"):
            final = aside.with_name(aside.name.removeprefix(".replaced-"))
            if not os.path.lexists(final):
                with suppress(FileNotFoundError):  # another rank was faster
                    os.rename(aside, final)


class RemoteStore(CheckpointStore):
    """A folder behind a URL. Files are written to a new subfolder; the manifest, written last, makes them a checkpoint.

    The only atomic operation that it needs is replacing a small file, which every service has.
    """

    holds_only_its_own = False  # a killed replacement leaves its files in the folder

    def list_names(self, *, recover: bool = True) -> list[str]:
        return sorted((name for name in self._list_numbered() if self.find_kind(f"{name}/{MANIFEST}") == "file"), key=int)

    def create_draft(self, name: str) -> Draft:
        for unfinished in {*self._list_numbered()} - {*self.list_names()}:
            self._delete(unfinished)
        token = secrets.token_hex(4)
        draft = Draft(f"{name}/{token}", f"{token}/")
        self._call(self.fs.makedirs, self._join(draft.folder), exist_ok=True)
        return draft

    @contextmanager
    def create(self, draft: Draft, file: str) -> Iterator[IO[bytes]]:
        stream = self._call(self.fs.open, self._join(draft.folder, file), "wb")
        try:
            yield stream
        finally:
            self._call(stream.close)

    def publish(self, draft: Draft, name: str, manifest: bytes) -> None:
        beside = self._join(draft.folder, MANIFEST)
        self._call(self.fs.pipe_file, beside, manifest)
        # Copied rather than moved: a move whose removal fails would discard a whole checkpoint.
        self._call(self.fs.cp_file, beside, self._join(name, MANIFEST))
        with suppress(OSError):
            self._call(self.fs.rm_file, beside)
        with suppress(OSError):
            for file in self.list_sizes(name):
                if file != MANIFEST and not file.startswith(draft.prefix):
                    self._delete(f"{name}/{file.split('/')[0]}")

    def discard(self, draft: Draft) -> None:
        name = draft.folder.split("/")[0]
        with suppress(OSError):
            self._delete(draft.folder if self.find_kind(f"{name}/{MANIFEST}") else name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._call(self.fs.rm_file, self._join(name, MANIFEST))
            self._delete(name)

    def fetch_header(self, name: str, file: str, size: int, scratch: Path) -> str:
        with self.open(name, file) as stream, self._locate_copy(file, scratch).open("wb") as copy:
            length = self._call(stream.read, 8)
            copy.write(length + self._call(stream.read, int.from_bytes(length, "little")))
            copy.truncate(size)  # the tensors are a hole until `fetch_body`
        return copy.name

    def fetch_body(self, name: str, file: str, scratch: Path) -> None:
        self._call(self.fs.get_file, self._join(name, file), str(self._locate_copy(file, scratch)))

    def _locate_copy(self, file: str, scratch: Path) -> Path:
        return scratch / file.replace("/", "-")

    def _list_numbered(self) -> list[str]:
        try:
            entries = self._call(self.fs.ls, self.path, detail=True)
        except FileNotFoundError:
            return []
        names = (info["name"].rstrip("/").rpartition("/")[2] for info in entries if info["type"] == "directory")
        return [name for name in names if NAME.fullmatch(name)]

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call(self.fs.rm, self._join(name), recursive=True)


def open_store(folder: Path | str) -> CheckpointStore:
    """Return the storage at a path or an fsspec URL.

    Raises:
        UsageError: fsspec does not know the URL's protocol, a package for it is missing, or its host does not answer.
    """
    if isinstance(folder, Path) or "://" not in folder:
        return LocalStore(LocalFileSystem(), str(Path(folder).absolute()), f"{Path(folder) / 'x'}"[:-1])
    spelling = folder if folder.endswith("/") else f"{folder}/"
    with convert_errors(UsageError, ValueError, ImportError, OSError, says=f"{folder.rstrip('/')} cannot be used"):
        fs, path = url_to_fs(spelling)
    return (LocalStore if isinstance(fs, LocalFileSystem) else RemoteStore)(fs, path, spelling)


def locate(checkpoint: Path | str) -> tuple[CheckpointStore, str]:
    """Return the storage of a checkpoint, and its name in it."""
    if isinstance(checkpoint, Path) or "://" not in checkpoint:
        path = Path(checkpoint)
        return open_store(path.parent), path.name
    folder = checkpoint.rstrip("/")
    name = folder.rpartition("/")[2]
    return open_store(folder.removesuffix(name)), name


def _delete(path: Path) -> None:
    """Remove a file or a folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
