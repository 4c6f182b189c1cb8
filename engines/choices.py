"""Choices of a configuration: a field holds one of several dataclasses, and its `kind` says which.

The type of such a field is a union of dataclasses with a class attribute `kind`. In JSON and TOML a value is an object with
that `kind` and its fields, or the kind alone. On the command line `--field KIND` chooses, and its fields become flags.

A variant whose `kind` is a property is open: its first field holds the kind, which may also be a `module:name`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.plugins import did_you_mean

# Metadata of a field whose own fields are flags without its name before them: --sampling.group, not --method.sampling.group.
BARE = {"bare": True}


def is_bare(field: "dataclasses.Field[Any]") -> bool:
    """Return whether the flags of a field's own fields have no name before them."""
    return bool(field.metadata.get("bare"))


def describe_fields(kind: type) -> dict[str, str]:
    """Return the help of each field of a dataclass by name, from its docstring and those of the classes that it extends."""
    import docstring_parser

    texts = dict[str, str]()
    for each in reversed(kind.__mro__):
        texts |= {
            part.arg_name: part.description or ""
            for part in docstring_parser.parse(each.__dict__.get("__doc__") or "").params
        }
    return texts


def locate(config: Any, field: str) -> tuple[Any, str]:
    """Return what holds a field, by its dotted name, and its name there; those of a method may stand without `method.`."""
    *parents, name = field.split(".")
    if not hasattr(config, field.partition(".")[0]):
        config = getattr(config, "method", None)
    for parent in parents:
        config = getattr(config, parent, None)
    return config, name


def is_set(config: Any, field: str) -> bool:
    """Return whether a field, by its dotted name, has another value than its default."""
    config, name = locate(config, field)
    declared = next(each for each in dataclasses.fields(config) if each.name == name)
    return bool(getattr(config, name) != default_of(declared))


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def refuse_unused(config: Any, place: str = "") -> None:
    """Raise UsageError for a setting that is not at its default and has no effect.

    The method `unused` of a dataclass yields the names of such settings, or of groups of them, and why: they follow from the
    other settings. A help leaves them out.

    Args:
        config: dataclass of settings.
        place: dotted name of the field that holds it, with a dot at its end.
    """
    for name, why in config.unused():
        if is_set(config, name):
            raise no_effect(f"{place}{name}", why)


def list_unused(config: Any, place: str = "") -> Iterator[str]:
    """Yield the settings without effect of a configuration and of the groups in it, by their dotted names as flags."""
    if hasattr(config, "unused"):
        yield from (f"{place}{name}" for name, _ in config.unused())
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from list_unused(value, place if is_bare(field) else f"{place}{field.name}.")


def variants(union: Any) -> tuple[type, ...]:
    """Return the dataclasses that a field of a union type may hold; nothing for any other type."""
    members = get_args(union) if get_origin(union) in (Union, UnionType) else ()
    return members if members and all(map(is_variant, members)) else ()


def is_variant(kind: Any) -> bool:
    """Return whether a class is a variant of a choice."""
    return dataclasses.is_dataclass(kind) and hasattr(kind, "kind")


def kinds(union: Any) -> list[str]:
    """Return the kinds of a union by name, those that an open variant knows first."""
    return [kind for variant in variants(union) for kind in kinds_of(variant)]


def is_open(variant: type) -> bool:
    """Return whether a variant's first field holds its kind."""
    return isinstance(getattr(variant, "kind", None), property)


def settings(variant: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a variant beside its kind."""
    return list(dataclasses.fields(variant))[is_open(variant) :]


def list_required(variant: type) -> list[str]:
    """Return the names of the fields that have no default."""
    return [field.name for field in settings(variant) if default_of(field) is dataclasses.MISSING]


def variant_of(union: Any, kind: Any, field: str) -> tuple[type, Callable[..., Any]]:
    """Return the variant of a kind, and the function that makes one from the fields beside its kind.

    Raises:
        UsageError: the union has no such kind; the message has the nearest one.
    """
    for variant in variants(union):
        if kind in kinds_of(variant) or (is_open(variant) and isinstance(kind, str) and ":" in kind):
            named = {dataclasses.fields(variant)[0].name: kind} if is_open(variant) else {}
            return variant, partial(variant, **named)
    known, extra = kinds(union), ", or module:name" if any(map(is_open, variants(union))) else ""
    near = did_you_mean(kind, known) if isinstance(kind, str) else ""
    raise UsageError(field, kind, f"one of {', '.join(known)}{extra}{near}")


def check_variant(value: object, union: Any, field: str) -> None:
    """Raise TypeError unless a value is one of the variants of a union."""
    if not isinstance(value, variants(union)):
        names = ", ".join(variant.__name__ for variant in variants(union))
        raise TypeError(f"{field} is {value!r}, expected one of {names}")


def kinds_of(variant: Any) -> list[str]:
    """Return the kinds of a variant."""
    return list(variant.list_kinds()) if is_open(variant) else [variant.kind]
