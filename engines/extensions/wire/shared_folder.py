"""The folder through which a user's trainers and servers on one machine exchange weights."""

import os
import stat
import tempfile
from pathlib import Path

from fluvial.engines.errors import RunError, convert_errors


def find_shared_folder() -> Path:
    """Return the folder in which this user's trainers leave weights for servers on the same machine, in memory if possible.

    It is made if it is not there. Nobody else can write to it.

    Raises:
        RunError: it cannot be made, or somebody else has made it.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent / f"fluvial-{os.getuid()}"
    with convert_errors(RunError, OSError, says=f"{folder} cannot be written"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o22:
        raise RunError(f"{folder} is not this user's own: remove it, or set `rollout.servers.weights_folder`")
    return folder
