"""Settings of a run as TOML: differences from its recipe, or all settings with their help."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

import tomli_w

from fluvial.engines.choices import describe_fields, is_bare, is_variant, list_kinds, list_variant_fields, locate
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.files.read import RECIPE
from fluvial.engines.run.record import CONVERTER

WIDTH = 110


def list_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the dotted name of each setting, as in flags, its value for JSON, and its help; a choice by its kind."""
    texts, variant = describe_fields(type(config)), is_variant(type(config))
    for field in list_variant_fields(type(config)) if variant else dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        text = " ".join(texts.get(field.name, "").split())
        if is_variant(type(value)):
            known = ", ".join(list_kinds(get_type_hints(type(config))[field.name]))
            yield name, value.kind, f"{text} One of {known}." if known else text
        if dataclasses.is_dataclass(value):
            yield from list_settings(value, prefix if is_bare(field) else f"{name}.")
        else:
            yield name, CONVERTER.unstructure(value), text


def list_differences(config: TrainConfig, base: TrainConfig) -> dict[str, Any]:
    """Return the settings, by dotted names, that differ from another run's; of a different kind, all fields."""
    before = {name: value for name, value, _ in list_settings(base)}
    changed = dict[str, Any]()
    for name, value, _ in list_settings(config):
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        if (
            name not in before
            or value != before[name]
            or any(before.get(each) != changed.get(each, before.get(each)) for each in parents)
        ):
            changed[name] = value
    return changed


def write_differences(recipe: str | None, config: TrainConfig, base: TrainConfig) -> str:
    """Return a file with the differences from a recipe, or without a recipe with all settings."""
    if recipe is None:
        entries = [_format_entry(name, value, None, config) for name, value, _ in list_settings(config)]
        return "\n".join([_format_header(None, config), *filter(None, entries)]) + "\n"
    changed = list_differences(config, base) | {"model": config.model}
    ordered = sorted(changed, key=lambda name: name != "model")
    entries = [_format_entry(name, changed[name], recipe, config) for name in ordered]
    if [*changed] == ["model"]:
        entries.append("# Nothing differs from the recipe. fluvial config --all prints every setting with its help.")
    return "\n".join([_format_header(recipe, config), *filter(None, entries)]) + "\n"


def write_all(recipe: str | None, config: TrainConfig) -> str:
    """Return a file with all settings, each below its help; None stands for unset values."""
    lines = [_format_header(recipe, config)]
    for name, value, text in list_settings(config):
        if entry := _format_entry(name, value, recipe, config):
            lines += ["", *(f"# {line}" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)), entry]
    return "\n".join(lines) + "\n"


def _format_header(recipe: str | None, config: TrainConfig) -> str:
    """Return the first line: the recipe, or the method's name."""
    key, value = ("method.name", config.method.method_name) if recipe is None else (RECIPE, recipe)
    return f"{key} = {_format_value(value)}"


def _format_entry(name: str, value: Any, recipe: str | None, config: TrainConfig) -> str:
    """Return the line of a setting; for a choice whose fields follow, that of its kind. A whole run leaves out None."""
    kind = type(getattr(*locate(config, name), None))
    key = f"{name}.kind" if is_variant(kind) and list_variant_fields(kind) else name
    if recipe is not None:
        return f"{key} = {_format_value(value)}"
    prefix = "" if hasattr(config, name.partition(".")[0]) else "method."
    return "" if value is None else f"{prefix}{key} = {_format_value(value)}"


def _format_value(value: Any) -> str:
    """Format a value as TOML in one line."""
    if value is None:
        return '"None"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_format_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else tomli_w.dumps({"x": value})[4:].strip()
