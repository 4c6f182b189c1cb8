"""Reading of the files of a run folder, which may still be written to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def damage(out: Path) -> list[str]:
    """Return what a report of a run folder leaves out, because it cannot be read: one line per file."""
    metrics, summary = out / "metrics.jsonl", out / "summary.json"
    found = []
    lines = len(metrics.read_text(encoding="utf-8", errors="replace").splitlines()) if metrics.is_file() else 0
    if left_out := lines - sum(1 for _ in read_records(metrics)):
        found.append(f"{metrics}, line {lines - left_out + 1} is damaged: the report leaves out it and all after it")
    files = [file for file in (summary, *sorted((out / "samples").glob("*.json"))) if file.is_file()]
    return [*found, *(f"{file} is damaged: the report leaves it out" for file in files if read_json(file) is None)]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, up to a line that a crash cut short; none if there is no such file."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or not isinstance(record.get("update"), int):
            return
        yield record
