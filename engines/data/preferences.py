"""Preferences: pairs of a preferred and a rejected image of one prompt, from a folder or a file.

A folder holds `preferences.jsonl`, with one line {"prompt", "win", "lose"} per pair, and the image files that it names.
Files of records, and folders written by datasets' `save_to_disk`, may also have the columns of Pick-a-Pic (two images and
their labels) or of HPD (several images and their ranks).
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.data.image_cache import ImageCache
from fluvial.engines.data.images import read_image
from fluvial.engines.data.prompts import check_prompts
from fluvial.engines.data.records import Prompt, read_file
from fluvial.engines.data.tables import FileRecord, is_data_set, read_rows
from fluvial.engines.errors import UsageError

PREFERENCES = "preferences.jsonl"


class Preference(NamedTuple):
    """Preferred and rejected clean sample of a prompt, `[*event]` each."""

    prompt: Prompt
    win: Tensor
    lose: Tensor


class PreferenceRecord(NamedTuple):
    """Preference in a file: two images of a prompt."""

    where: str  # file and line, for messages
    prompt: Prompt
    win: Path | bytes  # file of the preferred image, or its bytes
    lose: Path | bytes


class EncodedPreferences:
    """Preferences whose samples are read from a cache during training.

    Args:
        records: preferences.
        cache: cache with the samples of their images, except those that it left out.

    Raises:
        UsageError: all preferences were left out.
    """

    def __init__(self, records: Sequence[PreferenceRecord], cache: ImageCache) -> None:
        self.records = [record for record in records if (record.win, record.lose) not in cache.left_out]
        self.cache = cache
        if not self.records:
            raise UsageError(
                "no preference can be used: each has an image that cannot be read, or that fits none of the sizes"
            )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Preference:
        record = self.records[index]
        size = self.cache.sizes[record.win]
        return Preference(record.prompt, self.cache.sample(record.win, size), self.cache.sample(record.lose, size))

    @property
    def prompts(self) -> list[Prompt]:
        """Prompt of each preference, with the size of its images."""
        return [replace(record.prompt, size=self.cache.sizes[record.win]) for record in self.records]


def claim_preferences(folder: Path) -> None:
    """Create the folder for preferences, before any image is generated.

    Raises:
        UsageError: the folder already holds files, or cannot be created.
    """
    if (folder / PREFERENCES).exists():
        raise UsageError(f"{folder} already holds preferences: choose another folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds other files: choose a new or an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"preferences cannot be written to {folder}: {error.strerror}") from error


def write_preferences(folder: Path, chosen: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Write preferences and their images to a folder, which is created if necessary.

    Args:
        folder: folder without preferences.
        chosen: (prompt, preferred image, rejected image) per pair, images `[C, H, W]` in [0, 1].

    Raises:
        UsageError: the folder already holds preferences, or cannot be written.
    """
    from fluvial.models.images import to_image

    claim_preferences(folder)
    try:
        lines = []
        for number, (prompt, *both) in enumerate(chosen):
            names = [f"{number:06d}-{side}.png" for side in ("win", "lose")]
            for name, image in zip(names, both, strict=True):
                to_image(image, width=image.shape[-1], colour=len(image) > 1).save(folder / name)
            lines.append(json.dumps({"prompt": prompt, "win": names[0], "lose": names[1]}))
        (folder / PREFERENCES).write_text("\n".join(lines) + "\n", encoding="utf-8")
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
        folder: folder written by `write_preferences`, or another source, see `read_preference_records`.
        encode: function from images `[B, C, H, W]` in [0, 1] to clean samples; None for a model without one.
        shape: shape of one sample.
        check, heldout, skip: arguments of `read_preference_records`.

    Raises:
        UsageError: the model cannot encode images, an image is missing or unreadable, or as in `read_preference_records`.
    """
    if encode is None:
        raise UsageError(
            f"preferences of {folder} cannot be used: the job has no function from images to samples: pass `encode` to it"
        )
    preferences = []
    for record in read_preference_records(folder, check=check, heldout=heldout, skip=skip):
        try:
            images = torch.broadcast_tensors(*map(read_image, (record.win, record.lose)))  # one of them may be grey
            samples = encode(torch.stack(images))
        except (UsageError, RuntimeError) as error:
            raise UsageError(f"{record.where}: its images cannot be used: {' '.join(str(error).split())}") from error
        if tuple(samples.shape[1:]) != tuple(shape):
            raise UsageError(f"{record.where}: its images give samples of {list(samples.shape[1:])}, expected {list(shape)}")
        preferences.append(Preference(record.prompt, *samples.clone()))  # `encode` may reuse its buffer
    return tuple(preferences)


def read_preference_records(
    path: Path, *, check: Callable[[str], None], heldout: Sequence[str] = (), skip: Sequence[str] = ()
) -> tuple[PreferenceRecord, ...]:
    """Return the preferences of a folder or a file, without reading their images.

    A record has a column `prompt` or `caption`, and one of:

    - `win` and `lose`, or `path1` and `path2`, the first one preferred (HPDv3's arrays of JSON);
    - two images `image_0` and `image_1` (or `jpg_0` and `jpg_1`) with `label_0`, 1 if the first is preferred and 0 if the
      second is (Pick-a-Pic; ties are left out);
    - a list `images` (or `image_path`) with `rank` (lowest is best) or `human_preference` (highest is best), as in HPDv2;
      each two images of different rank are a preference.

    Args:
        path: folder with preferences.jsonl, file of records, or folder written by datasets' `save_to_disk`.
        check: function that raises ValueError for a string that is not a prompt of the model.
        heldout: prompts of the evaluation, which the preferences must not have.
        skip: prompts whose preferences are left out, because they were held out of this folder.

    Raises:
        UsageError: a file is missing, or a line is not a preference or has a held-out prompt; the message names file and
            line.
    """
    is_folder = path.is_dir() or not (path.exists() or path.suffix)
    file = path / PREFERENCES if is_folder and not is_data_set(path) else path
    folder, left_out = path if path.is_dir() else path.parent, frozenset(skip)
    preferences: list[PreferenceRecord] = []
    for record in read_rows(file, "preferences"):
        text = record.columns.get("prompt", record.columns.get("caption"))
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{record.where}: expected a column prompt or caption of text, got {', '.join(record.columns)}")
        [prompt] = check_prompts([(record.where, Prompt(text.strip()))], check=check, heldout=frozenset(heldout))
        if prompt.text not in left_out:
            preferences += [PreferenceRecord(record.where, prompt, *pair) for pair in _read_pairs(record, folder)]
    if not preferences:
        raise UsageError(f"preferences {file} is empty, expected one preference per line")
    return tuple(preferences)


def _read_pairs(record: FileRecord, folder: Path) -> Iterator[tuple[Path | bytes, Path | bytes]]:
    """Yield the (preferred, rejected) images of a record."""
    columns = record.columns

    def read(value: Any, column: str) -> Path | bytes:
        return read_file(value, f"{record.where}, column {column}", folder)

    for first, second in (("image_0", "image_1"), ("jpg_0", "jpg_1")):
        if {first, second, "label_0"} <= set(columns):
            label = _parse_cell(columns["label_0"])
            if label not in (0, 0.5, 1):
                raise UsageError(f"{record.where}, column label_0 is {label!r}, expected 0, 0.5 or 1")
            if label != 0.5 and _parse_cell(columns.get("has_label", True)):
                win, lose = (first, second) if label == 1 else (second, first)
                yield read(columns[win], win), read(columns[lose], lose)
            return
    listed = next((name for name in ("images", "image_path") if name in columns), None)
    ranked = next((name for name in ("rank", "ranks", "human_preference") if name in columns), None)
    if listed is not None and ranked is not None:
        yield from _pair_ranked(record, listed, ranked, read)
    elif named := next((pair for pair in (("win", "lose"), ("path1", "path2")) if {*pair} <= {*columns}), None):
        win, lose = named
        yield read(columns[win], win), read(columns[lose], lose)
    else:
        raise UsageError(
            f"{record.where}: expected the columns win and lose, or path1 and path2, or image_0, image_1 and label_0, or "
            f"images and rank, got {', '.join(columns)}"
        )


def _parse_cell(value: Any) -> Any:
    """Parse a number or bool in a cell of text; return other values unchanged."""
    try:
        return json.loads(value.lower()) if isinstance(value, str) else value
    except ValueError:
        return value


def _pair_ranked(
    record: FileRecord, listed: str, ranked: str, read: Callable[[Any, str], Path | bytes]
) -> Iterator[tuple[Path | bytes, Path | bytes]]:
    """Yield the preferences between ranked images of one prompt."""
    names, ranks = record.columns[listed], record.columns[ranked]
    if not isinstance(names, list) or not isinstance(ranks, list) or len(names) != len(ranks):
        raise UsageError(f"{record.where}: expected as many numbers in column {ranked} as images in column {listed}")
    if not all(isinstance(rank, int | float) and math.isfinite(rank) for rank in ranks):
        raise UsageError(f"{record.where}, column {ranked} holds {ranks}, expected numbers")
    sign = -1 if ranked == "human_preference" else 1
    for first, second in combinations(range(len(names)), 2):
        better = sign * (ranks[second] - ranks[first])
        if better:
            win, lose = (first, second) if better > 0 else (second, first)
            yield read(names[win], listed), read(names[lose], listed)
