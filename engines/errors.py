"""Errors that the user can correct. The command line prints them in one line and exits, without a traceback.

An error about a field is data: `UsageError("seed", -1, "an integer from 0")`. The library prints the field's name, `seed is
-1, ...`; the command line prints its flag, `--seed is -1, ...`. Inside a message a field's dotted name is written between
backticks: "set `rollout.eta` above 0" is printed as "set rollout.eta above 0", or as "set --rollout.eta above 0".
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FIELD = re.compile(r"`([A-Za-z_][\w.]*)`")
_NOT_GIVEN = object()
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED", re.IGNORECASE)
_COLLECTIVE = re.compile(r"\bNCCL (error|communicator)|\bnccl\w*Error|gloo/transport", re.IGNORECASE)
_DIST_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")  # of torch


class FluvialError(Exception):
    """Base class of all errors that the user can correct."""

    on_all_ranks = False  # whether every rank raises an error now, so that they can still act together

    def message(self) -> str:
        """Return the message, with its fields still marked."""
        return str(self.args[0]) if self.args else ""

    def name_fields(self, name: Callable[[str], str]) -> str:
        """Return the message with each field written as `name` returns it."""
        return _FIELD.sub(lambda match: name(match[1]), self.message())

    def __str__(self) -> str:
        return self.name_fields(str)


class UsageError(FluvialError, ValueError):
    """The request cannot be carried out as stated. Exit code 2.

    Args:
        field: dotted name of the wrong field, e.g. "rollout.eta"; or, as the only argument, the whole message.
        got: value of the field.
        expected: accepted values, e.g. "a number above 0".
        hint: explanation, or what to do.
    """

    def __init__(self, field: str, got: object = _NOT_GIVEN, expected: str = "", hint: str = "") -> None:
        super().__init__(*([field] if got is _NOT_GIVEN else [field, got, expected, hint]))
        self.field = None if got is _NOT_GIVEN else field
        self.got, self.expected, self.hint = got, expected, hint

    def message(self) -> str:
        if self.field is None:
            return super().message()
        expected = self.expected and f", expected {self.expected}"
        return f"`{self.field}` is {_format_value(self.got)}{expected}{self.hint and f': {self.hint}'}"


def no_effect(field: str, why: str) -> UsageError:
    """Return the error for a field that is set but has no effect, e.g. why="with solver euler"."""
    return UsageError(f"`{field}` has no effect {why}; remove it")


def _format_value(value: object) -> str:
    """Format a value for a message."""
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, str) else str(value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    by_message = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    return bool({"MemoryError", "OutOfMemoryError"} & names) or by_message


def describe_out_of_memory(error: BaseException) -> str:
    """Return the beginning of the message of an out-of-memory error."""
    line = " ".join((str(error).strip().splitlines() or [""])[0].split())
    return f"out of memory{line and f' ({line})'}"


def describe_machine_failure(error: BaseException) -> str | None:
    """Describe an error of memory or of the processes' connection in one line; None for other errors."""
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    if is_out_of_memory(error):
        return describe_out_of_memory(error) + (where or ": make passes smaller, or use more or larger devices")
    line = " ".join((str(error).strip().splitlines() or [""])[0].split())
    if type(error).__name__ in _DIST_ERRORS or (isinstance(error, RuntimeError) and _COLLECTIVE.search(line)):
        hint = "NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL says more"
        return f"a collective of the processes failed{where} ({line}); {hint}"
    return None


@contextmanager
def convert_errors(kind: Callable[[str], Exception], *causes: type[Exception], says: str = "") -> Iterator[None]:
    """Replace an error of `causes` inside the context by one of a kind: `says`, and the cause's message, in one line."""
    try:
        yield
    except causes as error:
        text = error.message() if isinstance(error, FluvialError) else str(error)  # `message` keeps the marks of fields
        reason = getattr(error, "strerror", None) or " ".join(text.split())
        raise kind(f"{says}: {reason}" if says else reason) from error


class RunError(FluvialError, RuntimeError):
    """The run cannot continue. Exit code 1. Everything saved so far is unchanged."""


class ElsewhereError(RunError):
    """Another rank failed; its own message says why."""


class LostProcessError(RunError):
    """Another process of the run died or no longer answers."""
