"""Prompt records: prompts with the metadata of their records, and scores split by source and tag."""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fluvial.core.checks import type_of
from fluvial.engines.data.sizes import Size
from fluvial.engines.data.tables import FileRecord, has_half_character
from fluvial.engines.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fluvial.models.replay.media import MediaSource, TextPrompt

MOST_WEIGHT = 1000.0
Split = dict[str, dict[str, dict[str, float]]]  # mean scores by kind of part (sources, tags), part and name
# Columns that are not part of the metadata, because they are fields of a prompt.
OWN = ("prompt", "negative_prompt", "weight")
FILES = ("image", "video", "audio")  # columns of files for rewards


@dataclass(frozen=True)
class Prompt:
    """Prompt with the other columns of its record.

        Prompt("three cats", tag="counting", metadata={"count": 3})

    Args:
        text: text of the prompt.
        negative: negative prompt of its samples, instead of the run's.
        image, video, audio: file that rewards receive as `condition_images` and so on, or its bytes; the first of a list of
            images. None takes the file of that name in `media`.
        weight: frequency of the prompt, relative to the others of its source.
        tag: kind of prompt, by which metrics are split.
        source: name of the file of the prompt, by which metrics are split.
        metadata: further columns of the record, which a reward with an argument `metadata` receives.
        size: size of its samples, in a run of several sizes; None if it is drawn.
        media: file or its bytes by argument of a pipeline's call; several for a list of images.

    Raises:
        ValueError: the weight is not in (0, 1000], or the text holds half a character.
    """

    text: str
    negative: str | None = None
    image: Path | bytes | None = None
    video: Path | bytes | None = None
    audio: Path | bytes | None = None
    weight: float = 1.0
    tag: str | None = None
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    size: Size | None = None
    media: "Mapping[str, MediaSource]" = field(default_factory=dict, hash=False)

    @property
    def model_input(self) -> "TextPrompt":
        """Input of the model: the text, with the pipeline's media; equal inputs have equal encodings."""
        if not self.media:
            return self.text
        from fluvial.models.replay.media import MediaPrompt

        return MediaPrompt(self.text, dict(self.media))

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MOST_WEIGHT:
            raise ValueError(
                f"prompt {self.text!r} has the weight {self.weight}, expected a number above 0 and at most {MOST_WEIGHT:g}"
            )
        if has_half_character(self.text) or has_half_character(self.negative):
            raise ValueError(f"prompt {self.text!r} holds half a character, e.g. of an emoji that was cut: remove it")
        for kind in FILES if self.media else ():
            if getattr(self, kind) is None:
                object.__setattr__(self, kind, _take_first(self.media.get(kind)))


def as_prompts(prompts: Iterable[str | Prompt]) -> tuple[Prompt, ...]:
    """Return strings and prompts as prompts."""
    return tuple(Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)


def texts(prompts: Iterable[Prompt]) -> list[str]:
    """Return the text of each prompt."""
    return [prompt.text for prompt in prompts]


def model_inputs(prompts: Iterable[Prompt]) -> list[Any]:
    """Return the model input of each prompt: its text, or a `MediaPrompt` for a pipeline with media."""
    return [prompt.model_input for prompt in prompts]


def list_negatives(prompts: Iterable[Prompt], otherwise: str) -> list[str]:
    """Return the negative prompt of each prompt, by default `otherwise`."""
    return [otherwise if prompt.negative is None else prompt.negative for prompt in prompts]


def copy_metadata(prompts: Iterable[Prompt]) -> list[dict[str, Any]]:
    """Return a deep copy of the metadata of each prompt."""
    return [deepcopy(dict(prompt.metadata)) for prompt in prompts]


def copy_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts that user code may keep and change."""
    pairs = zip(prompts, copy_metadata(prompts), strict=True)
    return [replace(prompt, metadata=metadata, media=dict(prompt.media)) for prompt, metadata in pairs]


def parse_prompt(
    record: FileRecord,
    *,
    folder: Path,
    source: str,
    columns: Sequence[str] = ("prompt",),
    media: Mapping[str, str] = MappingProxyType({}),
) -> Prompt:
    """Return the prompt of a record.

    The metadata holds all columns except `prompt`, `negative_prompt` and `weight`; `image`, `video` and `audio` are paths,
    and are omitted if the record holds the file itself.

    Args:
        record: record with a column `prompt`, and optionally `negative_prompt`, `image`, `video`, `audio`, `weight`, `tag`
            and any others.
        folder: base folder of relative paths.
        source: name of the file.
        columns: possible names of the column of the prompt; the first that the record has is taken.
        media: column of each argument of the pipeline's call that is an image, a video or a sound; a record may lack it.

    Raises:
        UsageError: the record has no prompt, or a column has an invalid value; the message names the column.
    """
    cells = record.columns
    column = next((name for name in columns if name in cells), None)
    if column is None:
        present = ", ".join(cells) or "none"
        names = " or ".join(columns)
        raise UsageError(f"{record.where} has no column {names}, it has {present}: rename the column, or remove the record")
    text = read_column(record, column) or ""
    if not text.strip():
        raise UsageError(f"{record.where}, column {column} is empty, expected a prompt")
    media = {argument: name for argument, name in media.items() if name in cells}
    columns_of_files = dict.fromkeys([*(name for name in FILES if name in cells), *media.values()])
    files = {name: read_files(cells[name], f"{record.where}, column {name}", folder) for name in columns_of_files}
    metadata = {name: value for name, value in cells.items() if name not in (*OWN, column, *files)}
    metadata |= {name: str(file) for name, file in files.items() if isinstance(file, Path)}
    arguments = {argument: files[name] for argument, name in media.items()}
    return Prompt(
        text.strip(),
        negative=read_column(record, "negative_prompt"),
        image=None if "image" in arguments else _take_first(files.get("image")),
        video=None if "video" in arguments else _take_first(files.get("video")),
        audio=None if "audio" in arguments else _take_first(files.get("audio")),
        weight=_read_weight(record),
        tag=read_column(record, "tag"),
        source=source,
        metadata=metadata,
        media=arguments,
    )


def read_column(record: FileRecord, column: str) -> str | None:
    """Return the text in a column, or None if it is absent; UsageError if it holds something else."""
    value = record.columns.get(column)
    if not isinstance(value, str | None):
        raise UsageError(f"{record.where}, column {column} is {type_of(value)}, expected text")
    return value


def read_files(value: Any, where: str, folder: Path) -> "MediaSource":
    """Return the file or list of files in a column, see `read_file`."""
    if not isinstance(value, list):
        return read_file(value, where, folder, or_folder=True)
    if not value:
        raise UsageError(f"{where} is an empty list, expected the paths of files")
    return tuple(read_file(one, where, folder, or_folder=True) for one in value)


def _take_first(source: "MediaSource | None") -> Path | bytes | None:
    return source[0] if isinstance(source, tuple) else source


def read_file(value: Any, where: str, folder: Path, *, or_folder: bool = False) -> Path | bytes:
    """Return the image, video or sound in a column: its path, or the bytes of its file.

    Args:
        value: path, bytes of a file, or both as stored by Hugging Face's `datasets`.
        where: place of the column, which begins each message.
        folder: base folder of a relative path.
        or_folder: whether the path may be a folder with the frames of a video.

    Raises:
        UsageError: the column holds something else, or the file does not exist.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} >= set(value) and value:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {type_of(value)}, expected the path of {'a' if or_folder else 'an image'} file")
    path = folder / value
    if not (path.is_file() or (or_folder and path.is_dir())):
        raise UsageError(f"{where} names {value}, which does not exist in {folder}")
    return path.absolute()


def _read_weight(record: FileRecord) -> float:
    value = record.columns.get("weight", 1.0)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= MOST_WEIGHT:
        raise UsageError(
            f"{record.where}, column weight is {value!r}, expected a number above 0 and at most {MOST_WEIGHT:g}"
        )
    return number


def split_scores(scores: "Tensor", prompts: Sequence[Prompt], names: Sequence[str]) -> Split:
    """Return the mean scores of each source and of each tag, with the number of samples.

    The result is {"sources": {source: {name: mean, ..., "samples": n}}, "tags": {tag: ...}}. A single source is omitted, and
    so are prompts without a tag.

    Args:
        scores: `[B, K]`, on the host.
        prompts: prompt of each sample, `[B]`.
        names: name of each score, `[K]`.
    """
    by_kind: Split = {}
    for kind, labels in (("sources", [each.source for each in prompts]), ("tags", [each.tag for each in prompts])):
        parts: dict[str, list[int]] = {}
        for number, label in enumerate(labels):
            if label is not None:
                parts.setdefault(label, []).append(number)
        if len(parts) > 1 or (parts and kind == "tags"):
            by_kind[kind] = {
                label: {**dict(zip(names, scores[rows].mean(0).tolist(), strict=True)), "samples": len(rows)}
                for label, rows in sorted(parts.items())
            }
    return by_kind
