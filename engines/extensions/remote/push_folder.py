"""The folder in which a trainer leaves weights for servers: complete or not there, and removed with its trainer."""

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


class Pushed(NamedTuple):
    """A push that lies in a folder, so that it can be sent again."""

    version: int
    folder: Path
    networks: tuple[str, ...]
    sums: Mapping[tuple[str, Any], str]  # checksum by network and a server's dtype, or `FILES`
    is_adapter: bool = False  # whether the folder holds an adapter, and not all weights


class PushFolder:
    """A folder of one trainer below one that servers see.

    The trainer holds a lock on it, which the system takes back when the trainer dies; see `remove_left`.

    Args:
        parent: folder that servers see; by default `find_shared_folder()`.

    Raises:
        RunError: it cannot be written.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = find_shared_folder() if parent is None else parent.absolute()
        with convert_errors(
            RunError, OSError, says=f"`rollout.servers.weights_folder` is {parent}, which cannot be written"
        ):
            parent.mkdir(parents=True, exist_ok=True)
            remove_left(parent)
            name = uuid.uuid4().hex[:16]
            made = parent / f".{name}"  # gets its name when it is locked, so that nobody takes it for one that was left
            made.mkdir()
            self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = made.rename(parent / f"{PREFIX}{name}")

    def finish(self, name: str) -> None:
        """Give the folder `.name` the name `name`. What had the name before is removed.

        Raises:
            RunError: that is not possible.
        """
        final = self.path / name
        with convert_errors(RunError, OSError, says=f"weights cannot be written to {final}"):
            shutil.rmtree(final, ignore_errors=True)
            os.rename(self.path / f".{name}", final)

    def keep(self, name: str = "") -> None:
        """Remove all folders but one; without a name, all."""
        for path in self.path.iterdir():
            if path.name not in (name, LOCK):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def remove_left(parent: Path) -> None:
    """Remove the folders of dead trainers: in shared memory they would take memory until the machine restarts."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
