"""Runs of these tests are short."""

import pytest
import short_runs


@pytest.fixture(autouse=True, scope="session")
def short() -> None:
    """Leave out the charts and most of the probe, but for the tests that put them back."""
    short_runs.shorten_runs()
