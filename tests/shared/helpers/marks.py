"""Marks of parameters."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Return values of parameters with which a test is run by `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.long)
