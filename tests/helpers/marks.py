"""Marks of parameters."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
