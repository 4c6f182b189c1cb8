"""Rows of records from files: JSON lines and arrays, CSV, Parquet, TOML, and data sets that `datasets` saved to disk."""

import csv
import json
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.core.checks import type_of
from fluvial.engines.errors import UsageError

# In a folder that datasets' `save_to_disk` wrote: the list of its Arrow files, or of its splits.
STATE, SPLITS = "state.json", "dataset_dict.json"
# Endings of files that hold records or tables and that `rows` does not read.
UNREAD = frozenset({".tsv", ".arrow", ".feather", ".gz", ".zip", ".tar"})


class Row(NamedTuple):
    """A record of a file."""

    where: str  # file and line, for messages
    columns: dict[str, Any]


def is_table(path: Path) -> bool:
    """Return whether a path holds records rather than plain text: by its ending, or because it is a folder."""
    return path.suffix.lower() in {*_FORMATS, *UNREAD} or path.is_dir()


def is_data_set(path: Path) -> bool:
    """Return whether a folder is one that datasets' `save_to_disk` wrote."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def rows(path: Path, what: str) -> Iterator[Row]:
    """Yield the records of a file in their order.

    Args:
        path: file that ends in .jsonl, .json, .csv, .parquet or .toml (tables `[[prompts]]`, as in a suite), or a folder
            that datasets' `save_to_disk` wrote.
        what: kind of file, which begins each message, e.g. "prompts file".

    Raises:
        UsageError: the file cannot be read, or a line is not a record; the message names file, line and column.
    """
    label = f"{what} {path}"
    if path.is_dir():
        yield from _data_set(path, label)
        return
    read = _FORMATS.get(path.suffix.lower())
    if read is None and not path.exists():
        raise UsageError(f"{label} cannot be read: No such file or directory")
    if read is None:
        raise UsageError(
            f"{label} ends in {path.suffix or 'nothing'}, expected .txt, .jsonl, .json, .csv, .parquet, or a folder that "
            "datasets saved to disk"
        )
    yield from read(path, label)


def read_text(path: Path, label: str) -> str:
    """Return the text of a file in UTF-8, with or without a byte-order mark.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{label} cannot be read: {reason}") from error


def _json_lines(path: Path, label: str) -> Iterator[Row]:
    # JSON text may hold other line separators of Unicode, which do not end a line.
    for number, line in enumerate(read_text(path, label).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{label}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UsageError(f"{where} holds {type_of(record)}, expected an object of columns")
        yield Row(where, record)


def _json_array(path: Path, label: str) -> Iterator[Row]:
    """Yield the records of an array of JSON, as HPD is published, or of the array `prompts` of a suite."""
    try:
        found = json.loads(read_text(path, label))
    except ValueError as error:
        raise UsageError(f"{label} is not JSON: {error} (a file with a record per line ends in .jsonl)") from error
    if isinstance(found, dict) and "prompts" in found:
        found = found["prompts"]
    if not isinstance(found, list):
        raise UsageError(f"{label} holds {type_of(found)}, expected an array of objects of columns")
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise UsageError(f"{label}, record {number} is {type_of(record)}, expected an object of columns")
        yield Row(f"{label}, record {number}", record)


def _csv(path: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a table with a header; an empty cell is an absent column, and all values are text."""
    lines = csv.reader(read_text(path, label).splitlines(keepends=True), strict=True)
    try:
        header = next(lines, [])
        if repeated := [name for name in header if header.count(name) > 1]:
            raise UsageError(f"{label}, line 1 names the column {repeated[0]!r} twice")
        for cells in lines:
            where = f"{label}, line {lines.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise UsageError(f"{where} has {len(cells)} cells, expected {len(header)} as in the header")
            yield Row(where, {name: cell for name, cell in zip(header, cells, strict=True) if cell != ""})
    except csv.Error as error:
        raise UsageError(f"{label}, line {lines.line_num} is not CSV: {error}") from error


def _toml(path: Path, label: str) -> Iterator[Row]:
    """Yield the tables `[[prompts]]` of a file."""
    try:
        found = tomllib.loads(read_text(path, label)).get("prompts")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{label} is not TOML: {error}") from error
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError(f"{label} holds no tables [[prompts]], expected one per prompt")
    for number, record in enumerate(found, start=1):
        yield Row(f"{label}, table {number}", record)


def _parquet(path: Path, label: str) -> Iterator[Row]:
    with _arrow_errors(label):
        from pyarrow.parquet import ParquetFile

        yield from _records(ParquetFile(path).iter_batches(), label)


def _data_set(folder: Path, label: str) -> Iterator[Row]:
    """Yield the rows of a data set that was saved to disk, from its Arrow files."""
    if (folder / SPLITS).is_file():
        splits = ", ".join(json.loads(read_text(folder / SPLITS, label)).get("splits", ()))
        raise UsageError(f"{label} holds several splits ({splits}): name the folder of one")
    if not (folder / STATE).is_file():
        raise UsageError(f"{label} is a folder without {STATE}, expected a file, or a folder that datasets saved to disk")
    with _arrow_errors(label):
        from pyarrow import ipc, memory_map

        files = [folder / entry["filename"] for entry in json.loads(read_text(folder / STATE, label))["_data_files"]]
        yield from _records((batch for file in files for batch in ipc.open_stream(memory_map(str(file)))), label)


def _records(batches: Iterable[Any], label: str) -> Iterator[Row]:
    """Yield the rows of Arrow's batches without their empty columns: in a table every row has all columns."""
    records = (record for batch in batches for record in batch.to_pylist())
    for number, record in enumerate(records, start=1):
        yield Row(f"{label}, row {number}", {name: value for name, value in record.items() if value is not None})


@contextmanager
def _arrow_errors(label: str) -> Iterator[None]:
    """Turn a missing pyarrow, and an error of Arrow or of the file, into one line."""
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"{label} needs pyarrow, which is not installed: pip install 'fluvial[data]'") from error
    except Exception as error:  # Arrow's own errors share no base class
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"{label} cannot be read: {reason}") from error


_FORMATS = {".jsonl": _json_lines, ".json": _json_array, ".csv": _csv, ".parquet": _parquet, ".toml": _toml}
PROMPT_FILES = (".txt", *_FORMATS)  # endings of files of prompts
