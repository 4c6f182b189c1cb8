"""Refusals: an error of one line."""

from collections.abc import Callable

import pytest


def refuses(says: str, call: Callable[..., object], /, *arguments: object, **options: object) -> None:
    """Assert that a call raises a ValueError of one line in which a pattern is found."""
    with pytest.raises(ValueError, match=says) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
