"""Preferences: pairs of images of one prompt, the preferred and the rejected one, in a folder.

The folder holds `preferences.jsonl`, with one line {"prompt", "win", "lose"} per pair, and the image files that it names.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.engines.errors import UsageError

PREFERENCES = "preferences.jsonl"


class Preference(NamedTuple):
    """Two clean samples of a prompt, `[*event]` each: the preferred one and the rejected one."""

    prompt: str
    win: Tensor
    lose: Tensor


def claim_preferences(folder: Path) -> None:
    """Make the folder for preferences, before any image is generated.

    Raises:
        UsageError: it already holds preferences, or cannot be made.
    """
    if (folder / PREFERENCES).exists():
        raise UsageError(f"{folder} already holds preferences: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"preferences cannot be written to {folder}: {error.strerror}") from error


def write_preferences(folder: Path, chosen: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Write preferences and their images to a folder, which is made if necessary.

    Args:
        folder: folder without preferences.
        chosen: (prompt, preferred image, rejected image) per pair, images `[C, H, W]` in [0, 1].

    Raises:
        UsageError: the folder already holds preferences, or cannot be written.
    """
    from fluvial.models.images import as_image

    claim_preferences(folder)
    try:
        lines = []
        for number, (prompt, *both) in enumerate(chosen):
            names = [f"{number:06d}-{side}.png" for side in ("win", "lose")]
            for name, image in zip(names, both, strict=True):
                as_image(image, width=image.shape[-1], colour=len(image) > 1).save(folder / name)
            lines.append(json.dumps({"prompt": prompt, "win": names[0], "lose": names[1]}))
        (folder / PREFERENCES).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise UsageError(f"preferences cannot be written to {folder}: {error.strerror}") from error


def read_preferences(
    folder: Path,
    *,
    encode: Callable[[Tensor], Tensor] | None,
    shape: tuple[int, ...],
    check: Callable[[str], None],
    heldout: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> tuple[Preference, ...]:
    """Return the preferences of a folder as clean samples of a model.

    Args:
        folder: folder that `write_preferences` wrote, or one like it.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples; None for a model that has none.
        shape: shape of one sample.
        check: function that raises ValueError for a string that is not a prompt of the model.
        heldout: prompts of the evaluation, which must not be in the folder.
        skip: prompts whose preferences are left out, because they were held out of this folder.

    Raises:
        UsageError: the model cannot encode images, a file is missing or unreadable, or a line is not a preference or has a
            held-out prompt; the message names file and line.
    """
    if encode is None:
        raise UsageError(
            f"preferences of {folder} cannot be used: this job has no function from images to samples (encode): pass one to "
            "the job"
        )
    left_out, found = frozenset(skip), []
    for where, prompt, names in _records(folder, check=check, heldout=heldout):
        if prompt in left_out:
            continue
        try:
            samples = encode(torch.stack([_image(folder / name) for name in names]))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{where}: its images cannot be used: {' '.join(str(error).split())}") from error
        if tuple(samples.shape[1:]) != tuple(shape):
            raise UsageError(f"{where}: its images give samples of {list(samples.shape[1:])}, expected {list(shape)}")
        found.append(Preference(prompt, *samples))
    return tuple(found)


def preferred_prompts(folder: Path, *, check: Callable[[str], None], heldout: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the prompts of a folder of preferences, each once, in their order.

    Args:
        folder, check, heldout: arguments of `read_preferences`.

    Raises:
        UsageError: the file is missing, or a line is not a preference or has a held-out prompt.
    """
    return tuple(dict.fromkeys(prompt for _, prompt, _ in _records(folder, check=check, heldout=heldout)))


def _records(
    folder: Path, *, check: Callable[[str], None], heldout: Sequence[str]
) -> Iterator[tuple[str, str, tuple[Path, Path]]]:
    """Yield the place in the file, the prompt and the names of the two images of each preference of a folder."""
    path, apart = folder / PREFERENCES, frozenset(heldout)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"preferences {path} cannot be read: {reason}") from error
    if not lines:
        raise UsageError(f"preferences {path} is empty, expected one preference per line")
    for number, line in enumerate(lines, start=1):
        where = f"preferences {path}, line {number}"
        try:
            record = json.loads(line)
            prompt, names = record["prompt"], (Path(record["win"]), Path(record["lose"]))
            check(prompt)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f'{where}: expected {{"prompt": ..., "win": ..., "lose": ...}}: {error}') from error
        if prompt in apart:
            raise UsageError(f"{where}: {prompt!r} is held out for evaluation, never trained on")
        yield where, prompt, names


def _image(path: Path) -> Tensor:
    """Return an image file as `[C, H, W]` in [0, 1], with 1 channel for grey images and 3 for all others."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        array = np.asarray(image if image.mode == "L" else image.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
