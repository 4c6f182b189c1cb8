"""A run as JSON: what a run folder's config.json holds, and the run that it is read back as."""

from pathlib import Path
from typing import Any, Literal, get_origin

import cattrs

from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.protocol import Objective
from fluvial.engines.objectives.table import name_of, objective_type
from fluvial.engines.train.config import TrainConfig


def as_record(config: TrainConfig) -> dict[str, Any]:
    """Return a run as JSON holds it: paths as text, tuples as lists, an objective and a sampler by their names.

    What is a person's own stands there as `module:name`.
    """
    record = CONVERTER.unstructure(config)
    record["rollout"]["sampler"] = config.rollout.sampler_name
    return record


def recorded(record: dict[str, Any]) -> TrainConfig:
    """Return the run that a config.json records.

    Raises:
        UsageError: a field is unknown or missing, or a value is not accepted, in one line.
    """
    if not isinstance(record, dict):
        raise UsageError(f"run is a {type(record).__name__}, expected an object of fields")
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


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    for kind in (bool, int, float, str):  # no conversion: the dataclasses check what they are given
        converter.register_structure_hook(kind, lambda value, _: value)
    worded = (int | Literal["auto"], bool | Literal["auto"])
    converter.register_structure_hook_func(lambda kind: kind in worded, lambda value, _: value)
    converter.register_structure_hook_func(_is_literal, lambda value, _: value)
    converter.register_unstructure_hook(Objective, _named_objective)
    converter.register_structure_hook(Objective, _objective)
    return converter


CONVERTER = _converter()
