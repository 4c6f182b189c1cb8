"""Folders that several tests need alike: each is made once per run of the suite, by whichever process needs it first."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def copy_of(name: str, folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder` with a copy of a stored folder, which `make` writes if no process has stored it yet.

    Args:
        name: name in the store.
        folder: where the copy goes.
        make: writes the content to the folder that it is given; must write the same at every call.
    """
    store = Path(os.environ["FLUVIAL_TEST_STORE"])  # set by conftest.py
    if not (store / name).exists():
        draft = store / f"{name}-{os.getpid()}"
        make(draft)
        try:
            draft.rename(store / name)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    shutil.copytree(store / name, folder)
    return folder
