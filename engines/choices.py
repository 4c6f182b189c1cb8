"""Choices of a configuration: a field holds one of several dataclasses, and its `kind` says which.

The type of such a field is a union of dataclasses with a class attribute `kind`. In JSON and TOML a value is an object with
that `kind` and its fields, or the kind alone. On the command line `--field KIND` chooses, and its fields become flags.

A variant whose `kind` is a property is open: its first field holds the kind, which may also be a `module:name`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

from fluvial.engines.errors import UsageError
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
    bare = (dataclasses.MISSING, dataclasses.MISSING)
    return [field.name for field in settings(variant) if (field.default, field.default_factory) == bare]


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
