"""Runs the tests: `make test`, and `make test-all` with `--all`. There are three pytest sessions:

    typed        core and kernels, with run-time checks of shapes and types in both packages
    untyped      the rest; of core and kernels what those checks would break (torch.compile) or answer first
    interpreter  the kernels in Triton's interpreter, which has to be chosen before they are imported

All three always run. The exit code is 0 if all passed. The last lines name the ten slowest tests, and the files that take
more than tests/durations.csv says. With `--all` the tests marked `long` run, too, and everything but the second and third
lines' files runs with checks. With `--again` the tests of a session that failed run once more. `--ledger` writes what was
measured to tests/durations.csv.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "shared"))
from helpers import ledger  # noqa: E402

SLOWEST = 10
TESTS_FAILED, NOTHING_SELECTED = 1, 5  # pytest's exit codes
UNTYPED = {"FLUVIAL_NO_TYPECHECK": "1"}
CHECKED = ("tests/core", "tests/kernels")
FOLDERS = ("tests/bench", "tests/engines", "tests/models", "tests/testing")
OTHERS = (*FOLDERS, *(f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py")))
WITHOUT_CHECKS = (
    "tests/core/test_composes.py",
    "tests/core/test_checks.py",
    "tests/kernels/test_dispatch.py",
    "tests/bench/test_kernels.py",
)
INTERPRETED = ("tests/kernels/test_fused.py",)


class Session(NamedTuple):
    """A run of pytest: its environment, and its files and folders."""

    name: str
    environment: dict[str, str]
    paths: tuple[str, ...]


def sessions(*, everything: bool) -> tuple[Session, ...]:
    """Return the sessions of `make test`, or those of `make test-all`."""
    return (
        Session("typed", {}, (*CHECKED, *OTHERS) if everything else CHECKED),
        Session("untyped", UNTYPED, WITHOUT_CHECKS if everything else (*OTHERS, *WITHOUT_CHECKS)),
        Session("interpreter", {**UNTYPED, "TRITON_INTERPRET": "1"}, INTERPRETED),
    )


def chosen(session: Session, named: list[str]) -> list[str]:
    """Return the paths of a session, or what the caller named among them."""
    paths = []
    for name in named:
        asked = Path(name.split("::")[0])
        if any(asked.is_relative_to(path) for path in session.paths):
            paths.append(name)
        else:
            paths += [path for path in session.paths if Path(path).is_relative_to(asked)]
    return paths if named else [*session.paths]


def run(session: Session, arguments: list[str], report: Path, *, again: bool) -> list[str]:
    """Run a session, with `again` its failed tests a second time, and return what is wrong with it."""
    named = [argument for argument in arguments if (ROOT / argument.split("::")[0]).exists()]
    paths = chosen(session, named)
    if not paths:
        return []
    print(f"\n{session.name}:", *paths, flush=True)
    options = [argument for argument in arguments if argument not in named]
    command = [sys.executable, "-P", "-m", "pytest", *options, *paths]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **session.environment}
    code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment).returncode
    if again and code == TESTS_FAILED:
        print(f"\n{session.name}: the tests that failed run once more", flush=True)
        code = subprocess.run([*command, "--last-failed"], cwd=ROOT, env=environment).returncode
    if code == NOTHING_SELECTED:
        return []
    problems = [f"{session.name}: pytest ended with code {code}"] if code else []
    ran = ledger.tests(session.name, report) if report.exists() and session.environment else []
    skipped = [test.name for test in ran if test.skipped and test.file in (*WITHOUT_CHECKS, *INTERPRETED)]
    return [*problems, *(f"{session.name}: {name} was skipped" for name in skipped)]


def main(arguments: list[str]) -> int:
    """Run all sessions with pytest's arguments, and return the exit code."""
    start, problems, tests = time.monotonic(), list[str](), list[ledger.Test]()
    measure, everything, again = (option in arguments for option in ("--ledger", "--all", "--again"))
    arguments = [argument for argument in arguments if argument not in ("--ledger", "--all", "--again")]
    if everything:
        arguments = ["-m", "not whole and not simulated", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        for session in sessions(everything=everything):
            report = Path(folder, f"{session.name}.xml")
            problems += run(session, arguments, report, again=again)
            if report.exists():
                tests += [test for test in ledger.tests(session.name, report) if not test.skipped]
    if not tests:
        problems.append("no test was selected")
    if measure:
        ledger.save(ledger.rows(tests))
    wrong, slower = ledger.growth(ledger.rows(tests), ledger.load())
    print(f"\nThe {SLOWEST} slowest of {len(tests)} tests, in seconds of CPU:")
    for test in sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]:
        print(f"{test.seconds:7.1f}  {test.file}::{test.name}")
    for line in [*slower, *problems, *wrong]:
        print(line)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU"
    print(f"{'FAILED' if problems or wrong else 'passed'} in {seconds}")
    return int(bool(problems or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
