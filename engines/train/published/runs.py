"""Published runs: what was trained, with which settings, and where each value was read."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class PublishedRun:
    """A published run as its source states it; a setting that the source does not state is absent.

    Args:
        name: `project/model/task`.
        model: id of the base model on the Hub.
        algorithm: name of the method, as its authors write it.
        source: repository, path and commit that the settings were read from.
        settings: values by field; the names are those of `FIELDS` in `fluvial.engines.train.published.fields`.
        paper: arXiv id; None if there is no paper.
        gpus: number of GPUs of the launcher; None if not stated.
        unusual: behaviour of the source that no setting shows.
        headline: published result, hours, and where they are stated.
    """

    name: str
    model: str
    algorithm: str
    source: Mapping[str, str]
    settings: Mapping[str, Any]
    paper: str | None = None
    gpus: int | None = None
    unusual: tuple[str, ...] = ()
    headline: Mapping[str, Any] = field(default_factory=dict)

    @property
    def project(self) -> str:
        """First part of the name."""
        return self.name.partition("/")[0]


@cache
def published_runs() -> Mapping[str, PublishedRun]:
    """Return all published runs by name, project by project."""
    return {run.name: run for run in _read()}


def find(name: str) -> PublishedRun:
    """Return a published run by its name.

    Raises:
        UsageError: no run has this name; the message gives the nearest one.
    """
    runs = published_runs()
    if name in runs:
        return runs[name]
    near = difflib.get_close_matches(name, runs, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"there is no published run {name!r}{hint} (fluvial runs lists all {len(runs)})")


def _read() -> Iterator[PublishedRun]:
    folder = files("fluvial.engines.train.published") / "data"
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if path.name.endswith(".toml"):
            for record in tomllib.loads(path.read_text(encoding="utf-8"))["run"]:
                yield PublishedRun(**{**record, "unusual": tuple(record.get("unusual", ()))})
