"""Files of settings in YAML, TOML or JSON: differences from a recipe, or a whole run. A list is a sweep."""

import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from fluvial.engines.choices import is_variant, list_variants, locate
from fluvial.engines.errors import UsageError
from fluvial.engines.plugins import suggest
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.files.hints import explain_unknown, find_settings
from fluvial.engines.run.record import as_record, list_members, read_record

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
RECIPE = "recipe"  # entry with the recipe that the file changes; it is not a field
METHOD = "method."


def read_settings(path: Path) -> dict[str, Any]:
    """Read the entries of a file, nested as in the file.

    Raises:
        UsageError: the file cannot be read, or is not a table.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        settings = _parse(text, path.suffix)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise UsageError(f"{path} holds {type(settings).__name__}, expected a table of settings such as optimizer.lr: 1e-4")
    return settings


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's scalars: 1e-4 is a number, and 0427, on and 12:30 are texts."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    for kind, pattern, first in (
        ("bool", r"true|True|false|False", "tTfF"),
        ("null", r"null|Null|~|", ["n", "N", "~", ""]),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
        ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), list(first))
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def flatten(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name, with underscores, and the value of each entry; a repeated entry is yielded twice."""
    for name, value in entries.items():
        dotted = f"{prefix}{name.replace('-', '_')}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def is_whole(entries: Mapping[str, Any]) -> bool:
    """Return whether a file holds a whole run, as config.json does, and not only differences from a recipe."""
    return RECIPE not in entries and ("method" in entries or "objective" in entries)


def apply_settings(config: TrainConfig, entries: Mapping[str, Any], names: Sequence[str]) -> TrainConfig:
    """Return a run with the entries of a file.

    Args:
        entries: settings, nested or by dotted names; `method.` may be left out. A name without a dot stands for the setting
            with this last part.
        names: names of all settings of the run, as in flags.

    Raises:
        UsageError: there is no such setting, or a value is not accepted; in one line.
    """
    values = dict[str, Any]()
    for name, value in flatten(entries):
        if name == RECIPE:
            continue
        plain = name.removeprefix(METHOD).removesuffix(".kind")
        if plain == "name" and name != plain:
            if value != config.method.method_name:
                hint = f"this run has the method {config.method.method_name}; `recipe` names another one"
                raise UsageError(f"method.name is {value!r}: {hint}")
            continue
        key = _resolve_name(config, plain, names)
        if key in values and values[key] != value:
            raise UsageError(f"{name} is set twice, to {values[key]!r} and {value!r}")
        values[key] = value
    record = as_record(config)
    for name in sorted(values, key=lambda name: name.count(".")):  # a kind comes before its fields
        *parents, last = name.split(".") if hasattr(config, name.partition(".")[0]) else ("method", *name.split("."))
        table = record
        for parent in parents:
            if not isinstance(table.get(parent), dict):
                table[parent] = {}  # of a kind that the run did not have
            table = table[parent]
        value, known = values[name], table.get(last)
        if isinstance(known, dict) and "kind" in known:
            table[last] = known if known["kind"] == value else {"kind": value}
        else:
            table[last] = None if value == "None" else value
    return read_record(record)


def _resolve_name(config: TrainConfig, name: str, names: Sequence[str]) -> str:
    """Return the full name of the setting that a name stands for."""
    if name in names:
        return name
    parts = name.split(".")
    # A field of a choice, whose kind may be another one in the same file, is checked with that kind.
    parents = (locate(config, ".".join(parts[:count])) for count in range(1, len(parts)))
    if any(is_variant(type(getattr(*parent, None))) for parent in parents):
        return name
    if len(meant := find_settings(name, names)) == 1:
        return meant[0]
    if meant:
        raise UsageError(f"{name} is ambiguous: name one of {', '.join(meant)}")
    hint = explain_unknown(name, names)
    raise UsageError(f"there is no setting {name}{suggest(name, names) if hint is None else f': {hint}'}")


def _find_type(config: Any, name: str) -> Any:
    """Return the declared type of a setting; None if unknown, e.g. for a field of another kind."""
    holder, last = locate(config, name)
    return get_type_hints(type(holder)).get(last)


# sweeps


def expand_sweeps(config: TrainConfig, entries: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the runs of a file: a name and the settings of each. A list is a sweep, unless the setting is a list.

    A setting that is a list is swept by a list of lists. Several sweeps give all combinations. Without a sweep there is one
    run, with an empty name.

    Args:
        config: run of the recipe, whose fields say which settings are lists.
        entries, names: see `apply_settings`.
    """
    flat = dict[str, Any]()
    for name, value in flatten(entries):
        if flat.setdefault(name, value) != value:
            raise UsageError(f"{name} is set twice, to {flat[name]!r} and {value!r}")
    swept = {
        name: values for name, values in flat.items() if isinstance(values, list) and _is_sweep(config, name, values, names)
    }
    for name, values in swept.items():
        if not values:
            raise UsageError(f"{name} is an empty list, expected a value, or several for a sweep")
    lasts = [name.rpartition(".")[2] for name in swept]
    short = {name: last if lasts.count(last) == 1 else name for name, last in zip(swept, lasts, strict=True)}
    runs = list[tuple[str, dict[str, Any]]]()
    for combination in itertools.product(*swept.values()):
        chosen = dict(zip(swept, combination, strict=True))
        runs.append(
            (",".join(f"{short[name]}={_format_label(value)}" for name, value in chosen.items()), {**flat, **chosen})
        )
    if len({name for name, _ in runs}) < len(runs):
        raise UsageError("the file names the same run twice: each value of a list is one run")
    return runs


def _is_sweep(config: TrainConfig, name: str, values: list[Any], names: Sequence[str]) -> bool:
    if name == RECIPE:
        raise UsageError("recipe is a list, expected one: compare the runs of several by fluvial report runs/*")
    plain = _resolve_name(config, name.removeprefix(METHOD).removesuffix(".kind"), names)
    declared = _find_type(config, plain)
    if not list_variants(declared) and any(get_origin(kind) is tuple or kind is tuple for kind in list_members(declared)):
        return bool(values) and all(isinstance(value, list) for value in values)
    return True


def _format_label(value: Any) -> str:
    """Format a value for the name of a folder."""
    if isinstance(value, Mapping):
        return "+".join(_format_label(each) for each in value.values())
    text = "+".join(map(str, value)) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")[:60]
