"""The single settings of a configuration."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def leaves(config: Any, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the path and the type of each field of a dataclass that holds no dataclass."""
    types, found = get_type_hints(type(config)), []
    for field in fields(config):
        value = getattr(config, field.name)
        path = (*prefix, field.name)
        found += leaves(value, path) if is_dataclass(value) else [(path, types[field.name])]
    return found
