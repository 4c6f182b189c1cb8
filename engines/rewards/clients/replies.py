"""Read what a server answered: any JSON value, or anything that a pickle may hold, becomes scores, NaN or one line."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fluvial.engines.errors import RunError
from fluvial.engines.wire.client import shown

LARGEST = 1e9  # size of a score; what is larger is a server's mistake


def score(value: Any) -> float:
    """Return a number as a score; NaN, which is no score, for None, for what is not finite, and for more than `LARGEST`.

    Raises:
        TypeError: it is no number.
    """
    if value is None:
        return math.nan
    if not isinstance(value, Real):
        raise TypeError
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


def scores(value: Any, count: int, *, where: str) -> list[float]:
    """Return a list of one score per sample.

    Args:
        value: what the server answered.
        count: number of samples.
        where: start of each message, e.g. "http://127.0.0.1:8000/compute: rewards".

    Raises:
        RunError: it is no list of that many numbers.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RunError(f"{where} is {kind(value)}, expected a list of {count} numbers")
    if len(value) != count:
        raise RunError(f"{where} has {len(value)} values, expected {count}, one per sample")
    found = []
    for number, element in enumerate(value):
        try:
            found.append(score(element))
        except TypeError:
            raise RunError(f"{where}[{number}] is {kind(element)}, expected a number") from None
    return found


def field(value: Any, name: str, *, where: str) -> Any:
    """Return the value of a field of a JSON object.

    Raises:
        RunError: it is no object, has no such field, or holds a message of an error in its place.
    """
    if not isinstance(value, dict):
        raise RunError(f"{where} answered with {kind(value)}, expected an object with the field {name}")
    if name in value and (value[name] is not None or not value.get("error")):
        return value[name]
    said = value.get("error") or value.get("detail")
    if said:
        text = said.get("message", said) if isinstance(said, dict) else said
        raise RunError(f"{where} reports an error: {shown(text if isinstance(text, str) else kind(text))}")
    has = ", ".join(shown(str(key)) for key in list(value)[:5]) or "no field"
    raise RunError(f"{where} answered with an object of {has}, expected the field {name}")


def element(value: Any, number: int, *, where: str) -> Any:
    """Return an element of a JSON list.

    Raises:
        RunError: it is no list, or is too short.
    """
    if not isinstance(value, list) or len(value) <= number:
        raise RunError(f"{where} is {kind(value)}, expected a list of at least {number + 1}")
    return value[number]


def kind(value: Any) -> str:
    """Return what a value is, for a message that stays short whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {shown(value)!r}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return f"of type {type(value).__name__}"
