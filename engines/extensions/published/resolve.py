"""Published runs as configurations of fluvial, and their comparison with the published settings."""

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from fluvial.engines.extensions.published.runs import Citation, PublishedRun, as_flag, find_run, load_constants
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.log.records import flatten
from fluvial.engines.run.record import as_record, read_record

ASSUMED = "assumed"  # reason of a setting that no source states


class ComparedSetting(NamedTuple):
    """Setting as published and as fluvial runs it."""

    setting: str
    published: str
    ours: str
    why: str  # empty if the two are equal
    source: Citation | None


def resolve(run: PublishedRun) -> TrainConfig:
    """Return the configuration of a published run; it differs from the publication by `run.deviations`."""
    return read_record({"out": f"runs/{run.name}", **run.build_overlay()})


def configure(name: str) -> TrainConfig:
    """Return the configuration of the published run of a name; recipes start from it."""
    return resolve(find_run(name))


def compare_settings(run: PublishedRun) -> Iterator[ComparedSetting]:
    """Yield the settings of the configuration and further ones that a source states, in the order of a config.json.

    A setting that no source states is assumed, whatever its value.
    """
    ours = {as_flag(name): value for name, value in flatten(as_record(resolve(run))).items()}
    known = ours, run.fixed, load_constants()
    stated = {name for name, setting in run.settings.items() if setting.source is not None}
    stated |= {*run.published, *run.deviations}
    tables = [path for name in ours for path in accumulate(name.split("."), "{}.{}".format)]  # each name after its tables
    for name in dict.fromkeys([*tables, *run.settings, *run.published, *run.deviations]):
        value = next((format_value(values[name]) for values in known if name in values), "")
        if name in stated:
            yield _format_setting(run, name, value)
        elif name in ours:
            yield ComparedSetting(name, "not stated", value, ASSUMED, None)


def format_value(value: Any) -> str:
    """Return a value as text."""
    if isinstance(value, list | tuple):
        return " ".join(map(format_value, value)) or "none"
    return value if isinstance(value, str) and value.strip() else json.dumps(value)


def _format_setting(run: PublishedRun, name: str, ours: str) -> ComparedSetting:
    """Return the comparison of a setting that a source states or that differs."""
    setting, deviation = run.settings.get(name), run.deviations.get(name)
    source = None if setting is None else setting.source
    published = run.published.get(name, "not stated" if source is None or setting is None else setting.value)
    if deviation is None:
        return ComparedSetting(name, format_value(published), ours, "", source)
    published = published if deviation.published is None else deviation.published
    ours = ours if deviation.ours is None else format_value(deviation.ours)
    return ComparedSetting(name, format_value(published), ours, f"[{deviation.kind}] {deviation.why}", source)
