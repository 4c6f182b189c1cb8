"""Records of files: JSON, CSV, TSV, Parquet, TOML, tars of webdataset, folders of `datasets`, data sets of the Hub."""

import csv
import io
import json
import os
import re
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.core.checks import type_of
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.models.hub import probe_hub
from fluvial.models.images import ENDINGS

# In a folder written by datasets' `save_to_disk`: the list of its Arrow files, or of its splits.
STATE, SPLITS = "state.json", "dataset_dict.json"
TEXT = ".txt"
CAPTION_FILES = ("txt", "caption")  # endings of the caption of an image
HUB = "hub:"  # prefix of a data set of the Hub
HUB_NAME = re.compile(r"hub:([^/]+/[^/]+)(?:/([^/]+)/([^/]+))?")
CONVERTED = "refs/convert/parquet"  # branch of a data set with its Parquet files
END = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of an Arrow stream


class FileRecord(NamedTuple):
    """Record of a file."""

    where: str  # file and line, for messages
    columns: dict[str, Any]


def is_text(path: Path) -> bool:
    """Return whether a file holds one prompt per line instead of records, by its ending."""
    return path.suffix.lower() == TEXT


def is_data_set(path: Path) -> bool:
    """Return whether a folder was written by datasets' `save_to_disk`."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def is_hub(word: object) -> bool:
    """Return whether a word names a data set of the Hugging Face Hub."""
    return str(word).startswith(HUB)


def read_rows(path: Path, what: str) -> Iterator[FileRecord]:
    """Yield the records of a file in order; nulls are absent columns.

    Args:
        path: file that ends in .jsonl, .json, .csv, .tsv, .parquet, .toml (tables `[[prompts]]`, as in a suite) or .tar (of
            webdataset), a folder written by datasets' `save_to_disk`, or `hub:OWNER/NAME[/CONFIG/SPLIT]`.
        what: kind of file, which begins each message, e.g. "prompts file".

    Raises:
        UsageError: the file cannot be read, or a line is not a record; the message names file, line and column.
    """
    label = f"{what} {path}"
    read = _read_hub if is_hub(path) else _read_data_set if os.path.isdir(path) else _FORMATS.get(path.suffix.lower())
    if read is None and not os.path.exists(path):  # a text may be too long for the name of a file
        text = "" if path.suffix else "; texts go into a file with one per line, or to Job(model, prompts=[...])"
        raise UsageError(f"{label} cannot be read: No such file or directory{text}")
    if read is None:
        raise UsageError(
            f"{label} ends in {path.suffix or 'nothing'}, expected {', '.join(PROMPT_FILES)}, or a folder that datasets "
            "saved to disk"
        )
    yield from map(drop_nulls, read(path, label))


def drop_nulls(record: FileRecord) -> FileRecord:
    """Return a record without its nulls; UsageError if a column holds half a character."""
    columns = {name: value for name, value in record.columns.items() if not _is_null(value)}
    if (cut := next((name for name, value in columns.items() if has_half_character(value)), None)) is not None:
        raise UsageError(f"{record.where}, column {cut} holds half a character, e.g. of an emoji that was cut: remove it")
    return FileRecord(record.where, columns)


def has_half_character(value: Any) -> bool:
    r"""Return whether a text, or one in a list or mapping, holds a lone surrogate (`\ud83e`), which cannot be encoded."""
    if isinstance(value, str):
        return not value.isascii() and value != value.encode(errors="ignore").decode()
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(has_half_character, parts))


def read_text(path: Path, label: str) -> str:
    """Return the text of a file in UTF-8, with or without a byte-order mark.

    Raises:
        UsageError: the file cannot be read.
    """
    with _convert_file_errors(label), path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read()
    if "\0" in text:  # UTF-16 without a byte-order mark
        raise UsageError(f"{label} cannot be read: it is not UTF-8 text")
    return text


def read_lines(path: Path, label: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line that is not blank.

    Lines end with LF, CR LF or CR; other line separators of Unicode are text.

    Raises:
        UsageError: the file cannot be read.
    """
    with _convert_file_errors(label), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if "\0" in line:  # UTF-16 without a byte-order mark
                raise UsageError(f"{label} cannot be read: it is not UTF-8 text")
            if text := line.strip():
                yield f"{label}, line {number}", text


def _read_json_lines(path: Path, label: str) -> Iterator[FileRecord]:
    for where, line in read_lines(path, label):
        yield FileRecord(where, _parse_columns(line, where))


def _parse_columns(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the columns of a JSON object."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where} holds {type_of(record)}, expected an object of columns")
    return record


def _read_json_array(path: Path, label: str) -> Iterator[FileRecord]:
    """Yield the records of a JSON array, as in HPD, or of the array `prompts` of a suite."""
    try:
        content = json.loads(read_text(path, label))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{label} is not JSON: {error} (a file with a record per line ends in .jsonl)") from error
    if isinstance(content, dict) and "prompts" in content:
        content = content["prompts"]
    if not isinstance(content, list):
        raise UsageError(f"{label} holds {type_of(content)}, expected an array of objects of columns")
    for number, record in enumerate(content, start=1):
        if not isinstance(record, dict):
            raise UsageError(f"{label}, record {number} is {type_of(record)}, expected an object of columns")
        yield FileRecord(f"{label}, record {number}", record)


def _read_csv(path: Path, label: str, delimiter: str = ",") -> Iterator[FileRecord]:
    """Yield the rows of a table with a header; empty cells are absent columns, and all values are text."""
    lines = csv.reader(io.StringIO(read_text(path, label), newline=""), strict=True, delimiter=delimiter)
    filled = (cells for cells in lines if len(cells) > 1 or "".join(cells).strip())
    try:
        header, cells = next(filled, []), None
        if repeated := [name for name in header if header.count(name) > 1]:
            raise UsageError(f"{label}, line 1 names the column {repeated[0]!r} twice")
        for cells in filled:
            where = f"{label}, line {lines.line_num}"
            if len(cells) != len(header):
                raise UsageError(f"{where} has {len(cells)} cells, expected {len(header)} as in the header")
            yield FileRecord(where, {name: cell or None for name, cell in zip(header, cells, strict=True)})
        if header and cells is None:
            raise UsageError(f"{label} has one line, {','.join(header)!r}, expected a header with rows below it")
    except csv.Error as error:
        raise UsageError(f"{label}, line {lines.line_num} is not CSV: {error}") from error


def _read_toml(path: Path, label: str) -> Iterator[FileRecord]:
    """Yield the tables `[[prompts]]` of a file."""
    try:
        content = tomllib.loads(read_text(path, label)).get("prompts")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{label} is not TOML: {error}") from error
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise UsageError(f"{label} holds no tables [[prompts]], expected one per prompt")
    for number, record in enumerate(content, start=1):
        yield FileRecord(f"{label}, table {number}", record)


def _read_tar(path: Path, label: str) -> Iterator[FileRecord]:
    """Yield the samples of a webdataset tar: consecutive files with the same name up to the first dot.

    The text of a .txt or .caption is the column `prompt`, an image is `image`, a .json holds further columns, and any other
    file is a column named by its ending.
    """

    def name_sample(member: tarfile.TarInfo) -> str:
        folder, slash, name = member.name.rpartition("/")
        return f"{folder}{slash}{name.partition('.')[0]}"

    with _convert_file_errors(label), tarfile.open(path) as archive:
        for name, members in groupby(filter(tarfile.TarInfo.isfile, archive), name_sample):
            where, columns = f"{label}, sample {name}", dict[str, Any]()
            for member in members:
                ending, data = member.name.removeprefix(f"{name}."), archive.extractfile(member).read()  # type: ignore[union-attr]
                if ending == "json":
                    columns |= _parse_columns(data, where)
                else:
                    column = "image" if f".{ending.lower()}" in ENDINGS else "prompt" if ending in CAPTION_FILES else ending
                    columns[column] = data.decode().strip() if column == "prompt" else data
            yield FileRecord(where, columns)


def _read_parquet(path: Path, label: str) -> Iterator[FileRecord]:
    with _convert_arrow_errors(label):
        from pyarrow.parquet import ParquetFile

        yield from _read_batches(ParquetFile(path).iter_batches(), label)


def _read_hub(path: Path, label: str) -> Iterator[FileRecord]:
    """Yield the rows of a data set of the Hub, by default of default/train; it is downloaded to the Hub's cache."""
    from huggingface_hub import snapshot_download

    if (parts := HUB_NAME.fullmatch(str(path))) is None:
        raise UsageError(f"{label} names no data set, expected {HUB}OWNER/NAME or {HUB}OWNER/NAME/CONFIG/SPLIT")
    config, split = parts[2] or "default", parts[3] or "train"
    with convert_errors(UsageError, OSError, ValueError, says=f"{label} cannot be downloaded"), probe_hub():
        wanted = f"{config}/{split}/*.parquet"
        folder = Path(snapshot_download(parts[1], repo_type="dataset", revision=CONVERTED, allow_patterns=wanted))
    files = sorted((folder / config / split).glob("*.parquet"))
    if not files:
        others = sorted({"/".join(file.relative_to(folder).parts[:2]) for file in folder.glob("*/*/*.parquet")})
        hint = f"name one of {', '.join(others)}" if others else f"name both, as in {path}/CONFIG/SPLIT"
        raise UsageError(f"{label} has no configuration {config} with a split {split}: {hint}")
    for file in files:
        yield from _read_parquet(file, label)


def _read_data_set(folder: Path, label: str) -> Iterator[FileRecord]:
    """Yield the rows of a data set on disk, from its Arrow files."""
    if (folder / SPLITS).is_file():
        splits = ", ".join(json.loads(read_text(folder / SPLITS, label)).get("splits", ()))
        raise UsageError(f"{label} holds several splits ({splits}): name the folder of one")
    if not (folder / STATE).is_file():
        raise UsageError(f"{label} is a folder without {STATE}, expected a file, or a folder that datasets saved to disk")
    with _convert_arrow_errors(label):
        from pyarrow import ipc, memory_map

        entries = json.loads(read_text(folder / STATE, label))["_data_files"]
        files = [_check_complete(folder / entry["filename"]) for entry in entries]
        yield from _read_batches((batch for file in files for batch in ipc.open_stream(memory_map(str(file)))), label)


def _check_complete(file: Path) -> Path:
    """Return an Arrow file if it is complete; Arrow itself accepts one that was cut between two batches."""
    with file.open("rb") as stream:
        stream.seek(-min(len(END), file.stat().st_size), os.SEEK_END)
        last = stream.read()
    if last != END:
        raise ValueError(f"{file.name} is truncated")
    return file


def _read_batches(batches: Iterable[Any], label: str) -> Iterator[FileRecord]:
    """Yield the rows of Arrow batches."""
    records = (record for batch in batches for record in batch.to_pylist())
    for number, record in enumerate(records, start=1):
        yield FileRecord(f"{label}, row {number}", record)


def _is_null(value: Any) -> bool:
    """Return whether a value is null, or a file of `datasets` without bytes and path."""
    return value is None or (isinstance(value, Mapping) and value == dict.fromkeys(("bytes", "path")))


@contextmanager
def _convert_file_errors(label: str) -> Iterator[None]:
    """Convert errors of the file system and of the encoding to UsageError."""
    try:
        yield
    except (OSError, UnicodeDecodeError, tarfile.TarError) as error:
        reason = (
            "it is not UTF-8 text"
            if isinstance(error, ValueError)
            else getattr(error, "strerror", None) or " ".join(str(error).split())
        )
        raise UsageError(f"{label} cannot be read: {reason}") from error


@contextmanager
def _convert_arrow_errors(label: str) -> Iterator[None]:
    """Convert a missing pyarrow, and errors of Arrow and of the file, to UsageError."""
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"{label} needs pyarrow, which is not installed: pip install 'fluvial[data]'") from error
    except Exception as error:  # Arrow's own errors share no base class
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{label} cannot be read: {reason}") from error


_FORMATS: dict[str, Callable[[Path, str], Iterator[FileRecord]]] = {
    **{".jsonl": _read_json_lines, ".json": _read_json_array, ".csv": _read_csv, ".tsv": partial(_read_csv, delimiter="\t")},
    **{".parquet": _read_parquet, ".toml": _read_toml, ".tar": _read_tar},
}
PROMPT_FILES = (TEXT, *_FORMATS)  # endings of prompt files
