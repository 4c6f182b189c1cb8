"""Runs of studies are short, as those of tests/engines are."""

import pytest
from helpers import short_runs


@pytest.fixture(autouse=True, scope="session")
def short() -> None:
    """Leave out the charts and most of the probe of runs."""
    short_runs.shorten_runs()
