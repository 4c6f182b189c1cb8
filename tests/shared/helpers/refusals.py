"""Errors of one line: of what was asked for, and of what happened."""

from collections.abc import Callable

import pytest


def refuses(says: str, call: Callable[..., object], /, *arguments: object, **options: object) -> None:
    """Assert that a call raises a ValueError of one line in which a pattern is found."""
    _expect(ValueError, says, call, *arguments, **options)


def fails(says: str, call: Callable[..., object], /, *arguments: object, **options: object) -> None:
    """Assert that a call raises a RunError of one line in which a pattern is found."""
    from fluvial.engines.errors import RunError  # which tests of the core do without

    _expect(RunError, says, call, *arguments, **options)


def _expect(kind: type[Exception], says: str, call: Callable[..., object], /, *arguments: object, **options: object) -> None:
    with pytest.raises(kind, match=says) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
