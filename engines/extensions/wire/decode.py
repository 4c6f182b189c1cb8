"""Typed decoding by msgspec: what does not fit its type is a `WireError` of one line that names the field.

Unknown fields are ignored, except by types that forbid them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
SEEDS = 2**63 - 1  # largest seed, id and version


class WireError(ValueError):
    """A message breaks the schema, or is larger than its receiver takes. The text is one line for the other side."""

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
    """Return a JSON value as an object of a type.

    Args:
        lenient: null stands for the default of any field, and 4.0 is an integer.
        hook: function that makes values of types that msgspec does not know.

    Raises:
        WireError: the value does not fit.
    """
    try:
        return msgspec.convert(_without_nulls(value) if lenient else value, kind, dec_hook=hook)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:  # the last of half a surrogate pair
        raise _one_line(error, name) from None


def decode(body: bytes | bytearray, kind: type[T], *, lenient: bool = False) -> T:
    """Return the JSON of a request's body as an object of a type; a field that the type lacks makes no object.

    Args:
        lenient: see `convert`.

    Raises:
        WireError: it is not JSON, or does not fit the type.
    """
    try:
        value: Any = msgspec.json.decode(body, type=Any if lenient else kind)
    except msgspec.ValidationError as error:
        raise _one_line(error, "") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise WireError("the body is not JSON, or is nested too deeply") from None
    return convert(value, kind, lenient=True) if lenient else value


def unpack(data: bytes, kind: Any, *, json: bool = False, name: str = "") -> Any:
    """Return a message of msgpack, or of JSON with base64 in place of bytes, as an object of a type; see `convert`.

    msgspec compares the sizes that a message announces with its length before it allocates anything.
    """
    try:
        return (msgspec.json if json else msgspec.msgpack).decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _one_line(error, name) from None


def _one_line(error: Exception, name: str) -> WireError:
    """Return an error of msgspec, "what - at `$.field`", with the field first."""
    text, _, path = str(error).partition(" - at `$")
    if isinstance(error, RecursionError):
        text = "it is nested too deeply"
    return WireError(f"{(name + path.rstrip('`')).lstrip('.') or 'the body'}: {text}")


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without null fields, its integral floats as integers."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
