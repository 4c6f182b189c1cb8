"""The world of a process, and runs that are short, unless a test asks for their charts."""

from collections.abc import Iterator

import pytest
from helpers import short_runs

from fluvial.engines.engine.world import World, init_world
from fluvial.engines.extensions.report import charts as drawing


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """The world of this process."""
    with init_world() as world:
        yield world


@pytest.fixture(autouse=True, scope="session")
def short() -> None:
    """Leave out the charts and most of the probe, but for the tests that ask for them."""
    short_runs.shorten_runs()


@pytest.fixture
def charts(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw charts in this test."""
    monkeypatch.setattr(drawing, "curves", short_runs.curves)
    monkeypatch.setattr(drawing, "as_svg", short_runs.as_svg)
