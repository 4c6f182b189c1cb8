"""Folder for weights from a trainer to servers: each push is complete or absent, and dead trainers' folders are removed."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.engines.errors import RunError, convert_errors
from fluvial.engines.extensions.wire.client import find_shared_folder

PREFIX, LOCK = "push-", ".lock"


class StoredPush(NamedTuple):
    """Push whose files are kept in a folder, so that it can be repeated."""

    version: int
    folder: Path
    networks: tuple[str, ...]
    sums: Mapping[tuple[str, Any], str]  # checksum by network and kind, see `PushSums`
    is_adapter: bool = False  # whether the folder holds an adapter instead of all weights


class PushFolder:
    """Subfolder of one trainer in a folder that servers see.

    The trainer locks it, and the system releases the lock when the trainer dies; see `remove_dead_folders`.

    Args:
        parent: folder that servers see; by default `find_shared_folder()`.

    Raises:
        RunError: the folder cannot be written.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = find_shared_folder() if parent is None else parent.absolute()
        with convert_errors(
            RunError, OSError, says=f"`rollout.servers.weights_folder` is {parent}, which cannot be written"
        ):
            parent.mkdir(parents=True, exist_ok=True)
            remove_dead_folders(parent)
            name = uuid.uuid4().hex[:16]
            hidden = parent / f".{name}"  # renamed once it is locked, so that nobody removes it as a dead trainer's
            hidden.mkdir()
            self._lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = hidden.rename(parent / f"{PREFIX}{name}")

    def finish(self, name: str) -> None:
        """Rename the folder `.name` to `name`, in place of an earlier one; RunError if that fails."""
        final = self.path / name
        with convert_errors(RunError, OSError, says=f"weights cannot be written to {final}"):
            shutil.rmtree(final, ignore_errors=True)
            os.rename(self.path / f".{name}", final)

    def keep(self, name: str = "") -> None:
        """Remove all folders except `name`."""
        for path in self.path.iterdir():
            if path.name not in (name, LOCK):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def remove_dead_folders(parent: Path) -> None:
    """Remove the folders of dead trainers, which would otherwise fill shared memory until the machine restarts."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
