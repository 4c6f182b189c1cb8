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
from fluvial.engines.plugins import suggest

# Metadata of a field whose inner fields are flags without its name as prefix: --sampling.group, not --method.sampling.group.
BARE = {"bare": True}


def is_bare(field: "dataclasses.Field[Any]") -> bool:
    """Return whether the flags of a field's inner fields lack its name as prefix."""
    return bool(field.metadata.get("bare"))


def describe_fields(kind: type) -> dict[str, str]:
    """Return the help of each field of a dataclass by name, from its docstring and those of its base classes."""
    import docstring_parser

    texts = dict[str, str]()
    for each in reversed(kind.__mro__):
        texts |= {
            part.arg_name: part.description or ""
            for part in docstring_parser.parse(each.__dict__.get("__doc__") or "").params
        }
    return texts


def locate(config: Any, field: str) -> tuple[Any, str]:
    """Return the object with a field, by its dotted name, and the field's name in it; `method.` may be left out."""
    *parents, name = field.split(".")
    if not hasattr(config, field.partition(".")[0]):
        config = getattr(config, "method", None)
    for parent in parents:
        config = getattr(config, parent, None)
    return config, name


def is_set(config: Any, field: str) -> bool:
    """Return whether a field, by its dotted name, differs from its default."""
    config, name = locate(config, field)
    declared = next(each for each in dataclasses.fields(config) if each.name == name)
    return bool(getattr(config, name) != find_default(declared))


def find_default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def refuse_unused(config: Any, prefix: str = "") -> None:
    """Raise UsageError for a setting that is not at its default and has no effect.

    The method `unused` of a dataclass yields settings, or groups of settings, that have no effect with the others, and the
    reasons. The help leaves them out.

    Args:
        config: dataclass of settings.
        prefix: dotted name of its field, with a dot at the end.
    """
    for name, why in config.unused():
        if is_set(config, name):
            raise no_effect(f"{prefix}{name}", why)


def list_unused(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names, as in flags, of settings without effect in a configuration and its groups."""
    if hasattr(config, "unused"):
        yield from (f"{prefix}{name}" for name, _ in config.unused())
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from list_unused(value, prefix if is_bare(field) else f"{prefix}{field.name}.")


def list_variants(union: Any) -> tuple[type, ...]:
    """Return the dataclasses of a union of variants; empty for any other type."""
    members = get_args(union) if get_origin(union) in (Union, UnionType) else ()
    return members if members and all(map(is_variant, members)) else ()


def is_variant(kind: Any) -> bool:
    """Return whether a class is a variant of a choice."""
    return dataclasses.is_dataclass(kind) and hasattr(kind, "kind")


def list_kinds(union: Any) -> list[str]:
    """Return the names of a union's kinds; of an open variant, those that it declares."""
    return [kind for variant in list_variants(union) for kind in list_variant_kinds(variant)]


def is_open(variant: type) -> bool:
    """Return whether a variant's first field holds its kind."""
    return isinstance(getattr(variant, "kind", None), property)


def list_variant_fields(variant: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a variant beside its kind."""
    return list(dataclasses.fields(variant))[is_open(variant) :]


def list_required(variant: type) -> list[str]:
    """Return the names of the fields without a default."""
    return [field.name for field in list_variant_fields(variant) if find_default(field) is dataclasses.MISSING]


def find_variant(union: Any, kind: Any, field: str) -> tuple[type, Callable[..., Any]]:
    """Return the variant of a kind, and a function that makes one from the fields beside its kind.

    Raises:
        UsageError: the union has no such kind; the message suggests the nearest one.
    """
    for variant in list_variants(union):
        if kind in list_variant_kinds(variant) or (is_open(variant) and isinstance(kind, str) and ":" in kind):
            named = {dataclasses.fields(variant)[0].name: kind} if is_open(variant) else {}
            return variant, partial(variant, **named)
    known, extra = list_kinds(union), ", or module:name" if any(map(is_open, list_variants(union))) else ""
    suggestion = suggest(kind, known) if isinstance(kind, str) else ""
    raise UsageError(field, kind, f"one of {', '.join(known)}{extra}{suggestion}")


def list_variant_kinds(variant: Any) -> list[str]:
    """Return the kinds of a variant."""
    return list(variant.list_kinds()) if is_open(variant) else [variant.kind]
