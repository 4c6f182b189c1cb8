"""Folders that several tests share: each is made once per run of the tests, by the process that needs it first."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def copy_of(name: str, folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder` with a copy of a stored folder, which `make` writes if no process has stored it yet.

    Args:
        name: name in the store.
        folder: destination of the copy.
        make: writes the content to the folder that it is given; must write the same at every call.
    """
    store = Path(os.environ["FLUVIAL_TEST_STORE"])  # set by conftest.py
    with (store / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be making it
        if not (store / name).exists():
            draft = store / f"{name}-{os.getpid()}"
            make(draft)
            draft.rename(store / name)
    shutil.copytree(store / name, folder)
    return folder
