"""Runs the whole suite: `make test`. Some files need a process of another kind, so there are three pytest sessions.

    typed        everything, with run-time shape and type checks over fluvial.core
    untyped      what the checks would break or answer first: torch.compile, and the library's own messages
    interpreter  the kernels in Triton's interpreter, which has to be chosen before they are imported

All three always run. The exit code is 0 if all passed. The last lines name the ten slowest tests of all sessions.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SLOWEST = 10
NOTHING_SELECTED = 5  # pytest's exit code
UNTYPED = {"FLUVIAL_NO_TYPECHECK": "1"}


class Session(NamedTuple):
    """A run of pytest: its environment, its files (none: all), and whether a skipped test means that nothing was tested."""

    name: str
    environment: dict[str, str]
    files: tuple[str, ...]
    skips: bool


SESSIONS = (
    Session("typed", {}, (), True),
    Session(
        "untyped",
        UNTYPED,
        (
            "tests/core/test_compile.py",
            "tests/core/test_checks.py",
            "tests/kernels/test_dispatch.py",
            "tests/bench/test_kernels.py",
        ),
        False,
    ),
    Session("interpreter", {**UNTYPED, "TRITON_INTERPRET": "1"}, ("tests/kernels/test_fused.py",), False),
)


def chosen(session: Session, named: list[str]) -> list[str] | None:
    """Return the files of a session among those that the caller named; None if none of them is its own."""
    if not named:
        return [*session.files]
    if not session.files:
        return named
    own = [name for name in named if name.split("::")[0] in session.files]
    return [
        *own,
        *(file for file in session.files if any(Path(file).is_relative_to(name) and file != name for name in named)),
    ] or None


def run(session: Session, arguments: list[str], report: Path) -> list[str]:
    """Run a session, and return what is wrong with it."""
    named = [argument for argument in arguments if (ROOT / argument.split("::")[0]).exists()]
    files = chosen(session, named)
    if files is None:
        return []
    print(f"\n{session.name}:", *files, flush=True)
    options = [argument for argument in arguments if argument not in named]
    command = [sys.executable, "-P", "-m", "pytest", *options, f"--junitxml={report}", *files]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONSAFEPATH": "1", **session.environment}).returncode
    if code == NOTHING_SELECTED:
        return []
    problems = [f"{session.name}: pytest ended with code {code}"] if code else []
    skipped = [name for name, _, skip in cases(report) if skip] if report.exists() and not session.skips else []
    return [*problems, *(f"{session.name}: {name} was skipped" for name in skipped)]


def cases(report: Path) -> list[tuple[str, float, bool]]:
    """Return each test of a session: its name, seconds with its set-up, and whether it was skipped."""
    found = ElementTree.parse(report).iter("testcase")
    return [
        (f"{case.get('classname')}::{case.get('name')}", float(case.get("time", 0)), case.find("skipped") is not None)
        for case in found
    ]


def main(arguments: list[str]) -> int:
    """Run all sessions with pytest's arguments, and return the exit code."""
    start, problems, tests = time.monotonic(), list[str](), list[tuple[str, float, bool]]()
    with tempfile.TemporaryDirectory() as folder:
        for session in SESSIONS:
            report = Path(folder, f"{session.name}.xml")
            problems += run(session, arguments, report)
            if report.exists():
                tests += cases(report)
    tests = [test for test in tests if not test[2]]
    print(f"\nThe {SLOWEST} slowest of {len(tests)} tests:")
    for name, seconds, _ in sorted(tests, key=lambda test: -test[1])[:SLOWEST]:
        print(f"{seconds:7.1f} s  {name}")
    if not tests:
        problems.append("no test was selected")
    for problem in problems:
        print(problem)
    print(f"{'FAILED' if problems else 'passed'} in {time.monotonic() - start:.0f} s")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
