"""Marks of single parameters of a test, and short names of the types of fixtures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Folders = Callable[[str], Path]  # the folder of a tiny pipeline, by its name
Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
