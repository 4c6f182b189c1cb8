"""A run as JSON: what a run folder's config.json holds, and the run that it is read back as."""

from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import cattrs

from fluvial.core.checks import type_of
from fluvial.engines.choices import is_variant, kinds, required, settings, variant_of, variants
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import name_of, objective_type
from fluvial.engines.train.config import TrainConfig


def as_record(config: TrainConfig) -> dict[str, Any]:
    """Return a run as JSON holds it: paths as text, tuples as lists, an objective by its name and a choice by its kind.

    Custom ones have the name `module:name`.
    """
    record: dict[str, Any] = CONVERTER.unstructure(config)
    return record


def recorded(record: dict[str, Any]) -> TrainConfig:
    """Return the run that a config.json records.

    Raises:
        UsageError: a field is unknown or missing, or a value is not accepted, in one line.
    """
    if not isinstance(record, dict):
        raise UsageError(f"run is {type_of(record)}, expected an object of fields")
    try:
        return CONVERTER.structure(record, TrainConfig)
    except cattrs.BaseValidationError as error:
        found = cattrs.transform_error(error, path="run", format_exception=_line)
        raise UsageError("; ".join(found)) from error


def _line(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"has unknown fields {', '.join(sorted(error.extra_fields))}"
    if isinstance(error, KeyError):
        return f"misses the field {error}"
    if isinstance(error, AttributeError):
        return "is no object of fields"
    return " ".join(str(error).split())


def _named_objective(objective: Any) -> dict[str, Any]:
    return {"name": name_of(objective), **CONVERTER.unstructure(objective, type(objective))}


def _objective(record: dict[str, Any], _: Any) -> Any:
    fields = dict(record)
    return CONVERTER.structure(fields, objective_type(fields.pop("name")))


def _with_kind(value: Any) -> dict[str, Any]:
    """Return a choice as an object with its kind and its fields."""
    return {
        "kind": value.kind,
        **{each.name: CONVERTER.unstructure(getattr(value, each.name)) for each in settings(type(value))},
    }


def _chosen(record: Any, union: Any) -> Any:
    """Return the choice of an object with a kind, or of a kind alone."""
    fields = {"kind": record} if isinstance(record, str) else record
    if not isinstance(fields, dict) or "kind" not in fields:
        raise ValueError(f"is {record!r}, expected an object with a kind, one of {', '.join(kinds(union))}")
    fields = dict(fields)
    variant, make = variant_of(union, fields.pop("kind"), "kind")
    if unknown := sorted(set(fields) - {each.name for each in settings(variant)}):
        raise ValueError(f"has unknown fields {', '.join(unknown)}")
    if missing := [name for name in required(variant) if name not in fields]:
        raise ValueError(f"misses the field {', '.join(missing)}")
    types = get_type_hints(variant)
    return make(**{name: CONVERTER.structure(value, types[name]) for name, value in fields.items()})


def _path(value: Any, _: Any) -> Path:
    if value == "":
        raise ValueError("is '', expected a path; the current folder is .")
    return Path(value)


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, _path)
    for kind in (bool, int, float, str):  # no conversion: the dataclasses check what they are given
        converter.register_structure_hook(kind, lambda value, _: value)
    worded = (int | Literal["auto"], int | Literal["auto", "rollout"], bool | Literal["auto"])
    converter.register_structure_hook_func(lambda kind: kind in worded, lambda value, _: value)
    converter.register_structure_hook_func(_is_literal, lambda value, _: value)
    converter.register_structure_hook_func(lambda kind: bool(variants(kind)), _chosen)
    converter.register_unstructure_hook_func(is_variant, _with_kind)
    # By identity: since Python 3.12 a hook that is registered for a protocol takes every class of its form, too.
    converter.register_unstructure_hook_func(lambda kind: kind is Objective, _named_objective)
    converter.register_structure_hook_func(lambda kind: kind is Objective, _objective)
    return converter


CONVERTER = _converter()
