"""Conversion of a run's configuration to JSON, for config.json, and back.

Paths are recorded as absolute paths, so that a run opens from any folder, and shown relative to the current folder.
"""

import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import cattrs

from fluvial.core.checks import type_of
from fluvial.engines import plugins
from fluvial.engines.choices import find_variant, is_variant, list_kinds, list_required, list_variant_fields, list_variants
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.table import METHODS, method_type
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.method import Method
from fluvial.engines.run.renames import migrate
from fluvial.engines.sampling.config import REPLAYED

Config = TypeVar("Config")
Move = Callable[[str], str | None]  # new path for a text; None if the text is not a path


def as_record(config: TrainConfig) -> dict[str, Any]:
    """Return a run as values of JSON: paths as text, tuples as lists, methods by name and choices by kind.

    The name of a custom one is `module:name`.
    """
    record: dict[str, Any] = CONVERTER.unstructure(config)
    return record


def read_record(record: dict[str, Any]) -> TrainConfig:
    """Return the run of a config.json; old names are converted by `run.renames`.

    Raises:
        UsageError: a field is unknown or missing, or a value is not accepted, in one line.
    """
    if not isinstance(record, dict):
        raise UsageError(f"run is {type_of(record)}, expected an object of fields")
    try:
        return CONVERTER.structure(migrate(record), TrainConfig)
    except cattrs.BaseValidationError as error:
        lines = cattrs.transform_error(error, path="run", format_exception=_describe_error)
        raise UsageError("; ".join(lines)) from error


def _describe_error(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"has unknown fields {', '.join(sorted(error.extra_fields))}"
    if isinstance(error, KeyError):
        return f"misses the field {error}"
    if isinstance(error, AttributeError):
        return "is not an object of fields"
    return " ".join(str(error).split())


def _unstructure_method(method: Any) -> dict[str, Any]:
    known = method.method_name in plugins.list_names("methods", METHODS) or ":" in method.method_name
    # An undeclared name could not be read again.
    name = method.method_name if known else plugins.spec_of(type(method))
    return {"name": name, **CONVERTER.unstructure(method, type(method))}


def _structure_method(record: Any, _: Any) -> Any:
    fields = {"name": record} if isinstance(record, str) else record
    if not isinstance(fields, dict) or "name" not in fields:
        raise ValueError(f"is {record!r}, expected an object with the name of a method, one of {', '.join(METHODS)}")
    fields = dict(fields)
    return CONVERTER.structure(fields, method_type(fields.pop("name")))


def _unstructure_kind(value: Any) -> dict[str, Any]:
    """Return a choice as an object with its kind and its fields."""
    return {
        "kind": value.kind,
        **{each.name: CONVERTER.unstructure(getattr(value, each.name)) for each in list_variant_fields(type(value))},
    }


def _structure_kind(record: Any, union: Any) -> Any:
    """Return the choice for an object with a kind, or for a kind alone."""
    fields = {"kind": record} if isinstance(record, str) else record
    if not isinstance(fields, dict) or "kind" not in fields:
        raise ValueError(f"is {record!r}, expected an object with a kind, one of {', '.join(list_kinds(union))}")
    fields = dict(fields)
    variant, make = find_variant(union, fields.pop("kind"), "kind")
    if unknown := sorted(set(fields) - {each.name for each in list_variant_fields(variant)}):
        raise ValueError(f"has unknown fields {', '.join(unknown)}")
    if missing := [name for name in list_required(variant) if name not in fields]:
        raise ValueError(f"misses the field {', '.join(missing)}")
    types = get_type_hints(variant)
    return make(**{name: CONVERTER.structure(value, types[name]) for name, value in fields.items()})


def _structure_path(value: Any, _: Any) -> Path:
    if value == "":
        raise ValueError("is '', expected a path; the current folder is .")
    return Path(value)


def _structure_texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"is {value!r}, expected a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


def list_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; for any other type the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_worded(kind: Any) -> bool:
    """Return whether a type has literal words, integers and booleans only."""
    return all(part in (int, bool) or get_origin(part) is Literal for part in list_members(kind))


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, _structure_path)
    # A single text stands for a tuple of one, as in the teacher of older records.
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], lambda value, _: _structure_texts(value))
    for kind in (bool, int, float, str):  # not converted: the dataclasses check their values
        converter.register_structure_hook(kind, lambda value, _: value)
    converter.register_structure_hook_func(_is_worded, lambda value, _: value)
    converter.register_structure_hook_func(lambda kind: bool(list_variants(kind)), _structure_kind)
    converter.register_unstructure_hook_func(is_variant, _unstructure_kind)
    # By identity: since Python 3.12 a hook for a protocol also applies to every class with its members.
    converter.register_unstructure_hook_func(lambda kind: kind is Method, _unstructure_method)
    converter.register_structure_hook_func(lambda kind: kind is Method, _structure_method)
    return converter


CONVERTER = _make_converter()


def _move_weighted(text: str, move: Move) -> str | None:
    """Move the path of a file, or of a file with a weight."""
    name, separator, weight = text.rpartition("=")
    moved = move(text)
    if moved is None and separator and (file := move(name)) is not None:
        return f"{file}={weight}"
    return moved


def _move_teacher(text: str, move: Move) -> str | None:
    """Move the path of a folder, or of a source's folder."""
    source, separator, folder = text.partition("=")
    if (moved := move(text)) is not None or not separator:
        return moved
    return None if (moved := move(folder)) is None else f"{source}={moved}"


def _move_options(text: str, move: Move) -> str | None:
    """Move the paths among the options of a reward: values with a slash, and those of `weights`."""
    return re.sub(r"(?<=weights=)[^,=+]+|(?<==)[^,=+]*/[^,=+]*", lambda match: move(match[0]) or match[0], text)


def _move_source(text: str, move: Move) -> str | None:
    folder = move(text.removeprefix(REPLAYED)) if text.startswith(REPLAYED) else None
    return None if folder is None else REPLAYED + folder


# Functions that move the paths in a field's text, by field; fields of type Path need none.
TEXTS: dict[str, Callable[[str, Move], str | None]] = {
    "model": lambda text, move: None if text in MODELS else move(text),
    "checkpoint.folder": lambda text, move: move(text),
    "pipeline.settings": lambda text, move: move(text),
    "checkpoint.resume_from": lambda text, move: move(text),
    "rollout.source": _move_source,
    "method.teacher": _move_teacher,
    **dict.fromkeys(("prompts", "data.images", "pipeline.heldout", "evaluation.prompts"), _move_weighted),
    **dict.fromkeys(("rewards", "evaluation.rewards"), _move_options),
}


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return a configuration with absolute paths; a text is a path if a file or folder exists there."""

    def move(text: str) -> str | None:
        return _make_absolute(text) if os.path.exists(text) else None

    return _move_paths(config, move, lambda path: Path(_make_absolute(str(path))))


def expand_home(config: Config) -> Config:
    """Expand `~` at the start of paths in settings, where the shell does not, e.g. after `=`."""

    def move(text: str) -> str | None:
        return os.path.expanduser(text) if text.startswith("~") else None

    return _move_paths(config, move, lambda path: Path(os.path.expanduser(path)))


def locate_paths(config: TrainConfig, out: Path) -> TrainConfig:
    """Return a recorded configuration with paths that are valid from the current folder.

    A path that no longer exists is looked for relative to the run folder, in case it was moved together with it. Relative
    paths, in older records, start from the folder in which the run was started, or else from the current one.
    """
    finder = PathFinder(Path(config.out), out)
    return _move_paths(config, finder, lambda path: Path(finder(str(path)) or path))


class PathFinder:
    """Finder of recorded paths.

    Args:
        recorded: the run folder as the record names it.
        out: the run folder now.
    """

    def __init__(self, recorded: Path, out: Path) -> None:
        self.recorded, self.out = recorded, Path(_make_absolute(str(out)))
        parts = recorded.parts
        began = not recorded.is_absolute() and self.out.parts[-len(parts) :] == parts
        self.start = Path(*self.out.parts[: -len(parts)]) if began else Path.cwd()

    def __call__(self, text: str) -> str | None:
        """Return the present path of a recorded one, relative to the current folder if inside it; None if it is missing."""
        candidates = [self.start / text, Path.cwd() / text]
        if os.path.isabs(text) and self.recorded.is_absolute():
            candidates.append(self.out / os.path.relpath(text, self.recorded))
        for path in candidates:
            if text and "://" not in text and os.path.exists(path):
                spelled = _make_absolute(str(path))
                return os.path.relpath(spelled) if Path(spelled).is_relative_to(Path.cwd()) else spelled
        return None

    def locate_model(self, recorded: str) -> str:
        """Return a recorded model with its present path, if it is one."""
        return TEXTS["model"](recorded, self) or recorded

    def is_same(self, name: str, recorded: Any, now: Any) -> bool:
        """Return whether a recorded setting has the same paths as a run's setting with absolute paths."""
        if isinstance(now, list):
            recorded = recorded if isinstance(recorded, list) else [recorded]  # the field was a single text then
            return len(recorded) == len(now) and all(self.is_same(name, *pair) for pair in zip(recorded, now, strict=True))
        if not isinstance(recorded, str):
            return bool(recorded == now)

        def move(text: str) -> str | None:
            path = self(text)
            return None if path is None else _make_absolute(path)

        return now in (recorded, TEXTS.get(name, lambda text, move: move(text))(recorded, move))


def _move_paths(config: Config, move: Move, move_path: Callable[[Path], Path], prefix: str = "") -> Config:
    """Return a configuration with moved paths."""
    changes: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if isinstance(value, Path):
            moved: Any = move_path(value)
        elif name in TEXTS and isinstance(value, str):
            moved = TEXTS[name](value, move) or value
        elif name in TEXTS and isinstance(value, tuple):
            moved = tuple(TEXTS[name](word, move) or word for word in value)
        elif is_dataclass(value) and not isinstance(value, type):
            moved = _move_paths(value, move, move_path, f"{name}.")
        else:
            continue
        if field.init and moved != value:
            changes[field.name] = moved
    return replace(config, **changes) if changes else config  # type: ignore[type-var]


def _make_absolute(text: str) -> str:
    """Return an absolute path, without `..` if that is the same file."""
    plain = os.path.abspath(text)
    return plain if os.path.realpath(plain) == os.path.realpath(text) else str(Path(text).absolute())
