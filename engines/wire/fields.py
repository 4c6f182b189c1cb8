"""Values of a JSON object as numbers, texts and flags; what is none of these is one line."""

import math
from collections.abc import Mapping
from typing import Any

from fluvial.engines.wire.errors import WireError

MOST_ITEMS = 4096  # of one list
SEEDS = (0, 2**63 - 1)


class Fields:
    """Fields of a JSON object, read one by one; fields that nobody reads are ignored.

    Args:
        value: the JSON value.
        where: its name in messages; empty for the whole body.

    Raises:
        WireError: it is no object.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, Mapping):
            raise WireError(f"{where or 'the body'} is of type {type(value).__name__}, expected an object")
        self.value, self.where = value, where

    def name(self, field: str) -> str:
        """Return the full name of a field, for messages."""
        return f"{self.where}.{field}" if self.where else field

    def has(self, field: str) -> bool:
        """Return whether a field is there and not null."""
        return self.value.get(field) is not None

    def text(self, field: str, default: str | None = None, *, most: int = 65536) -> str | None:
        """Return a text; None where there is none."""
        value = self.value.get(field)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self._wrong(field, value, f"a text of at most {most} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise WireError(f"{self.name(field)} holds half of a surrogate pair, expected Unicode text") from None
        return value

    def choice(self, field: str, default: str, accepted: tuple[str, ...]) -> Any:
        """Return one of the accepted texts."""
        value = self.value.get(field)
        if value is None:
            return default
        if value not in accepted or not isinstance(value, str):
            raise self._wrong(field, value, f"one of {', '.join(accepted)}")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.value.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def number(self, field: str, default: float | None = None, *, low: float = 0.0, high: float = 1e6) -> float | None:
        """Return a finite number."""
        value = self.value.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(_float(value)):
            raise self._wrong(field, value, "a finite number")
        if not low <= value <= high:
            raise self._wrong(field, value, f"a number in [{low:g}, {high:g}]")
        return float(value)

    def integer(self, field: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int | None:
        """Return an integer; 4.0 is one."""
        value = self.value.get(field)
        return default if value is None else self._integer(field, value, low, high)

    def integers(self, field: str, *, low: int = 0, high: int = 2**31 - 1) -> tuple[int, ...] | None:
        """Return a list of integers; None where there is none."""
        value = self.value.get(field)
        return None if value is None else self._integers(field, value, low, high)

    def rows(self, field: str, *, low: int = 0, high: int = 2**31 - 1) -> tuple[tuple[int, ...], ...] | None:
        """Return a list of lists of integers; None where there is none."""
        value = self.value.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise self._wrong(field, value, f"a list of at most {MOST_ITEMS} lists of integers")
        return tuple(self._integers(f"{field}[{number}]", row, low, high) for number, row in enumerate(value))

    def texts(self, field: str, *, accepted: tuple[str, ...] = ()) -> tuple[str, ...] | None:
        """Return a list of texts; None where there is none."""
        value = self.value.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MOST_ITEMS or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, value, "a list of texts")
        if accepted and (unknown := [item for item in value if item not in accepted]):
            raise self._wrong(field, unknown[0], f"texts among {', '.join(accepted)}")
        return tuple(value)

    def inner(self, field: str) -> "Fields | None":
        """Return the fields of an object within; None where there is none."""
        value = self.value.get(field)
        return None if value is None else Fields(value, self.name(field))

    def _integers(self, field: str, value: Any, low: int, high: int) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise self._wrong(field, value, f"a list of at most {MOST_ITEMS} integers")
        return tuple(self._integer(f"{field}[{number}]", item, low, high) for number, item in enumerate(value))

    def _integer(self, field: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(field, value, f"an integer in [{low}, {high}]")
        return value

    def _wrong(self, field: str, value: Any, expected: str) -> WireError:
        return WireError(f"{self.name(field)} is {shown(value)}, expected {expected}")


def shown(value: Any) -> str:
    """Return a value of the other side for a message, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    text = repr(value[:8] if isinstance(value, str | list) and len(value) > 40 else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
