"""Typed decoding with msgspec. A value of the wrong type raises a `WireError` of one line that names the field.

Unknown fields are ignored, except by types that forbid them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
SEEDS = 2**63 - 1  # largest seed, id and version


class WireError(ValueError):
    """Message that breaks the schema or exceeds the receiver's limits. Its text is one line, for the other side."""

    def __init__(self, problem: str) -> None:
        super().__init__(" ".join(problem.split()))


def convert(
    value: Any,
    kind: type[T],
    *,
    lenient: bool = False,
    name: str = "",
    hook: Callable[[type, Any], Any] | None = None,
) -> T:
    """Convert a JSON value to a type.

    Args:
        lenient: null stands for the default of any field, and 4.0 is an integer.
        name: path of the value, for messages.
        hook: msgspec's `dec_hook`, which decodes types that msgspec does not know.

    Raises:
        WireError: the value does not fit the type.
    """
    try:
        return msgspec.convert(_drop_nulls(value) if lenient else value, kind, dec_hook=hook)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:  # the last of half a surrogate pair
        raise _build_error(error, name) from None


def decode(body: bytes | bytearray, kind: type[T], *, lenient: bool = False) -> T:
    """Decode the JSON body of a request to a type. Fields that the type lacks are skipped without allocating objects.

    Args:
        lenient: see `convert`.

    Raises:
        WireError: the body is not JSON, or does not fit the type.
    """
    try:
        value: Any = msgspec.json.decode(body, type=Any if lenient else kind)
    except msgspec.ValidationError as error:
        raise _build_error(error, "") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise WireError("the body is not JSON, or is nested too deeply") from None
    return convert(value, kind, lenient=True) if lenient else value


def unpack(data: bytes, kind: Any, *, json: bool = False, name: str = "") -> Any:
    """Decode msgpack, or JSON with base64 for bytes, to a type; see `convert`.

    msgspec checks announced sizes against the length of the message before it allocates anything.
    """
    try:
        return (msgspec.json if json else msgspec.msgpack).decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _build_error(error, name) from None


def _build_error(error: Exception, name: str) -> WireError:
    """Turn msgspec's "problem - at `$.field`" into a `WireError` with the field first."""
    text, _, path = str(error).partition(" - at `$")
    if isinstance(error, RecursionError):
        text = "it is nested too deeply"
    return WireError(f"{(name + path.rstrip('`')).lstrip('.') or 'the body'}: {text}")


def _drop_nulls(value: Any) -> Any:
    """Drop null fields of a JSON value, and turn integral floats into integers."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
