"""Images with captions: folders and records of them, and image files as tensors."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fluvial.engines.data.prompt_table import PromptTable
from fluvial.engines.data.prompts import check_prompts
from fluvial.engines.data.records import MOST_WEIGHT, Prompt, parse_prompt
from fluvial.engines.data.sizes import Size
from fluvial.engines.data.tables import CAPTION_FILES, FileRecord, is_data_set, is_text, read_lines, read_rows
from fluvial.engines.errors import UsageError
from fluvial.models import images as files
from fluvial.models.images import ENDINGS, compute_sort_key

CAPTIONS = ("prompt", "text", "caption")  # names of the column of a caption
REPEATS = re.compile(r"(\d+)_(.+)")  # name of a folder of kohya: weight and caption of its images
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # beside images, as in the Hub's imagefolder


def read_images(
    path: Path, *, check: Callable[[str], None], heldout: Collection[object] = (), source: str | None = None
) -> PromptTable:
    """Return the captions of images, each with its image.

    A folder holds images, and their captions either in files of the same name (`fox.png`, `fox.txt` or `fox.caption`) or in
    `metadata.jsonl` (or .csv, .parquet) with the columns `file_name` and `text`, as in the Hub's imagefolder. Folders of
    kohya, `10_red fox`, hold images of weight 10; `red fox` is the caption of images without their own. A file of records,
    or a folder written by datasets' `save_to_disk`, has the columns `image` and `prompt`, `text` or `caption`.

    Args:
        path: folder or file.
        check, heldout, source: arguments of `prompts.read_prompts`.

    Raises:
        UsageError: there are no images, an image lacks a caption or a caption an image, or a caption is not a prompt or is
            held out; the message names the file.
    """
    prompts = check_prompts(_locate(path, path.stem if source is None else source), check=check, heldout=heldout)
    if not prompts:
        raise UsageError(f"data {path} holds no images, expected some with captions")
    return prompts


def read_size(image: Path | bytes) -> Size:
    """Return the size of an image file from its header, after EXIF rotation.

    Raises:
        UsageError: the image cannot be read; the message names it.
    """
    try:
        return Size(*files.read_image_size(image))
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_image(image: Path | bytes, size: tuple[int, int] | None = None) -> Tensor:
    """Return an image file as `[C, H, W]` in [0, 1], opened as `models.images.read_image` does.

    Args:
        image: file of the image, or its bytes.
        size: height and width that the image is scaled to cover and cut to around its centre, as RGB. None keeps the size,
            with 1 channel for grey images and 3 for others.

    Raises:
        UsageError: the image cannot be read; the message names it.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        plain = files.read_image(image)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if size is not None:
        plain = ImageOps.fit(plain.convert("RGB"), (size[1], size[0]), Image.Resampling.BICUBIC)
    array = np.asarray(plain, dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1).contiguous()


def _locate(path: Path, source: str) -> Iterator[tuple[str, Prompt]]:
    """Yield each caption with its image, and its place in the files."""
    table = next((path / name for name in METADATA if (path / name).is_file()), None)
    if table is None and path.is_dir() and not is_data_set(path):
        yield from _read_pairs(path, source)
        return
    if table is None and path.is_file() and is_text(path):
        raise UsageError(
            f"data {path} is text, expected a folder of images, or records: .jsonl, .json, .csv, .tsv, .parquet, .tar"
        )
    folder = path if path.is_dir() else path.parent
    for record in read_rows(table or path, "data"):
        columns = dict(record.columns)
        if "image" not in columns and "file_name" in columns:
            columns["image"] = columns.pop("file_name")
        prompt = parse_prompt(FileRecord(record.where, columns), folder=folder, source=source, columns=CAPTIONS)
        if prompt.image is None:
            raise UsageError(f"{record.where} has no column image or file_name, it has {', '.join(record.columns)}")
        yield record.where, prompt


def _read_pairs(folder: Path, source: str) -> Iterator[tuple[str, Prompt]]:
    """Yield the captions of a folder whose images have text files of the same name beside them."""
    paths = (path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    files = sorted((path for path in paths if path.is_file()), key=compute_sort_key)
    images = [file for file in files if file.suffix.lower() in ENDINGS]
    named = {file.with_suffix("") for file in images}
    repeats = {image.parent: REPEATS.fullmatch(image.parent.name) for image in images}
    of_kohya = all(match is not None and 0 < int(match[1]) <= MOST_WEIGHT for match in repeats.values())
    if images and of_kohya and os.environ.get("RANK", "0") == "0":
        weights = ", ".join(f"{match[0]} {match[1]}" for match in repeats.values() if match is not None)
        print(f"data {folder}: images have the weights of kohya's folders: {weights}", file=sys.stderr)
    if stray := [file for file in files if file.suffix[1:] in CAPTION_FILES and file.with_suffix("") not in named]:
        raise UsageError(f"data {folder}: the caption {stray[0].name} has no image of the same name")
    for image in images:
        candidates = [image.with_suffix(f".{ending}") for ending in CAPTION_FILES]
        file = next(filter(Path.is_file, candidates), None)
        where, match = f"data {folder}: {image.relative_to(folder)}", repeats[image.parent] if of_kohya else None
        if file is None and match is None:
            raise UsageError(
                f"{where} has no caption: write {candidates[0].name} beside it, or {METADATA[0]} for all images"
            )
        text = match[2] if match is not None else ""
        if file is not None and not (text := " ".join(line for _, line in read_lines(file, f"caption {file}"))):
            raise UsageError(f"{where} has an empty caption in {file.name}")
        path, weight = image.absolute(), 1.0 if match is None else float(match[1])
        yield where, Prompt(text, image=path, source=source, weight=weight, metadata={"image": str(path)})
