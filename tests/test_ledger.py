"""The ledger of durations (durations.csv) is complete and within the limits of `make test`; no time is measured here."""

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ledger

ROOT = Path(__file__).parents[1]
# Seconds of CPU, of a ledger that may have been measured on a busy machine, where the same tests take a fifth more.
MOST, MOST_OF_A_FILE = 790, 100
WRITE = "run `python -P tests/sessions.py --ledger` with the files"


def row(processes: int, seconds: float, *, tests: int = 3) -> ledger.FileTimes:
    """Return a row of a file."""
    return ledger.FileTimes("untyped", "tests/test_x.py", False, tests, processes, seconds)


def test_every_test_file_has_a_row() -> None:
    """And no row is of a file that has gone."""
    alone = "pytestmark = pytest.mark.simulated"  # in processes of their own
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if alone not in path.read_text().splitlines()]
    files = {str(path.relative_to(ROOT)) for path in found}
    known = {row.file for row in ledger.load()}
    assert sorted(files - known) == [], WRITE
    assert sorted(known - files) == [], WRITE


def test_what_runs_by_default_is_short() -> None:
    """A new slow test shows in its file's row: mark it `long`, and leave a short case of its property."""
    short = {file: row.seconds for (file, long), row in ledger.by_file(ledger.load()).items() if not long}
    assert {file for file, seconds in short.items() if seconds > MOST_OF_A_FILE} == set()
    assert sum(short.values()) <= MOST


@pytest.mark.parametrize(
    ("measured", "wrong", "slower"),
    [
        (row(8, 10.0), 0, 0),
        (row(10, 10.0), 1, 0),
        (row(4, 16.0), 0, 0),
        (row(4, 30.0), 0, 1),
        (row(40, 90.0, tests=2), 0, 0),  # a part of the file
        (row(5, 9.0)._replace(file="tests/test_new.py"), 1, 1),
    ],
)
def test_growth_is_seen(measured: ledger.FileTimes, wrong: int, slower: int) -> None:
    """In processes, which counts as a failure, and in time, which is said."""
    found = ledger.growth([measured], [row(4, 10.0)])
    assert tuple(map(len, found)) == (wrong, slower)


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("again", [True, False])
def test_failed_tests_run_once_more_where_that_is_asked_for(
    second: int, again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those alone, and once; the report of the first run stays, and a test that fails twice fails the session."""
    found = runpy.run_path(str(ROOT / "tests" / "sessions.py"))
    left, commands = [1, second], list[list[str]]()

    def ended(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=left.pop(0))

    monkeypatch.setattr(subprocess, "run", ended)
    session = next(session for session in found["sessions"](everything=True) if session.name == "typed")
    problems = found["run"](session, ["-n", "2"], tmp_path / "report.xml", again=again)
    assert (problems == []) == (again and second == 0)
    assert [("--last-failed" in command) for command in commands] == [False, True][: 1 + again]
    assert [any("junitxml" in word for word in command) for command in commands] == [True, False][: len(commands)]
