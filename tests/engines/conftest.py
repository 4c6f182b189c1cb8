"""Runs that are short, unless a test asks for their charts, and the command line in the test process."""

from typing import Any

import pytest
from helpers import launch, short_runs

from fluvial.engines.cli import main as cli
from fluvial.engines.extensions.report import charts as drawing


@pytest.fixture(autouse=True, scope="session")
def short() -> None:
    """Leave out the charts and most of the probe, but for the tests that ask for them."""
    short_runs.shorten_runs()


@pytest.fixture
def charts(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw charts in this test."""
    monkeypatch.setattr(drawing, "draw_curves", short_runs.curves)
    monkeypatch.setattr(drawing, "to_svg", short_runs.as_svg)


@pytest.fixture
def fluvial(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command line, `fluvial(*words, code=0)`; return what it prints, or the one line of its error."""

    def run(*words: object, code: int = 0) -> str:
        capfd.readouterr()
        found = cli.run([str(word) for word in words])
        out, errors = capfd.readouterr()
        assert found == code, errors
        return out if code == 0 else launch.one_line(errors)

    return run
