"""Names of the files and folders that hold weights, and how a file reaches the disk."""

import json
import os
import stat
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError

MODEL = "diffusion_pytorch_model"  # diffusers' stem for the weights of a model
LORA = "pytorch_lora_weights.safetensors"  # diffusers' name for the weights of an adapter


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, as `from_pretrained` chooses them.

    Other variants may lie in the same folder; they are left out.

    Raises:
        UsageError: there are none, or one that the index lists is missing.
    """
    index = folder / f"{MODEL}.safetensors.index.json"
    if not index.is_file():
        names = [f"{MODEL}.safetensors"]
    else:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} cannot be read: {error}") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UsageError(f"{folder} holds no weights: there is no {missing[0]}")
    return [folder / name for name in names]


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any new file; safetensors has 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(stat.S_IMODE(mode))


def shared_folder() -> Path:
    """Return the folder in which this user's trainers leave weights for servers on the same machine, in memory if possible.

    It is made if it is not there. Nobody else can write to it.

    Raises:
        RunError: it cannot be made, or somebody else has made it.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent / f"fluvial-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o22:
        raise RunError(f"{folder} is not this user's own: remove it, or set `rollout.servers.weights_folder`")
    return folder


def sync(path: Path) -> None:
    """Write a file's data, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
