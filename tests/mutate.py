"""Applies known faults to a copy of the tree, one at a time, and shows that a test catches each.

    python -P tests/mutate.py            all of them, in some minutes
    python -P tests/mutate.py --only 3   one of them
    python -P tests/mutate.py --list     the faults as a table

A fault of faults.toml replaces one text in one file of a temporary copy, whose packages come first on PYTHONPATH. The tree
itself is never changed. Without faults the copy must pass the same tests, or they would prove nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "models", "engines", "bench")
COPIED = (*FOLDERS, "tests", "pyproject.toml", "README.md", "constraints.txt", "Makefile")
INTERPRETER = {"TRITON_INTERPRET": "1", "FLUVIAL_NO_TYPECHECK": "1"}


class Fault(NamedTuple):
    """A fault: what it is, the text it replaces in a file, and the test that catches it."""

    what: str
    file: str
    old: str
    new: str
    test: str
    interpreter: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that the test runs in."""
        return INTERPRETER if self.interpreter else {}


FAULTS = tuple(Fault(**fault) for fault in tomllib.loads((ROOT / "tests" / "faults.toml").read_text())["fault"])


def copied(folder: Path) -> None:
    """Copy the tree to a folder, with the namespace that makes its packages `fluvial`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    namespace = folder / "namespace" / "fluvial"
    namespace.mkdir(parents=True)
    for name in FOLDERS:
        (namespace / name).symlink_to(folder / name)
    (namespace / "testing").symlink_to(folder / "tests" / "properties")


def patched(folder: Path, fault: Fault) -> None:
    """Put a fault into a copy of the tree.

    Raises:
        AssertionError: the file does not hold the text exactly once.
    """
    path = folder / fault.file
    text = path.read_text()
    count = text.count(fault.old)
    assert count == 1, f"{fault.file} holds the text of {fault.what!r} {count} times, expected once: {fault.old!r}"
    path.write_text(text.replace(fault.old, fault.new))


def passes(folder: Path, tests: Sequence[str], environment: dict[str, str]) -> bool:
    """Run tests in a copy of the tree, and return whether they all pass.

    Raises:
        AssertionError: they did not run.
    """
    path = os.pathsep.join([str(folder / "namespace"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-m", "long or not long", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or " failed" in done.stdout or " error" in done.stdout, done.stdout[-3000:]
    return done.returncode == 0


def show(numbers: Sequence[int]) -> int:
    """Apply faults by number, print a line for each, and return how many were not caught."""
    missed, faults = 0, {number: FAULTS[number - 1] for number in numbers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        for environment in ({}, INTERPRETER):
            tests = sorted({fault.test for fault in faults.values() if fault.environment == environment})
            assert not tests or passes(folder, tests, environment), "a test fails without a fault: run pytest to see which"
        for number, fault in faults.items():
            path = folder / fault.file
            text = path.read_text()
            patched(folder, fault)
            caught = not passes(folder, [fault.test], fault.environment)
            path.write_text(text)
            missed += not caught
            print(f"{number:3d}  {'caught' if caught else 'NOT CAUGHT':<10}  {fault.what}: {fault.test}", flush=True)
    return missed


def table() -> str:
    """Return the faults as a table in Markdown."""
    rows = [
        f"| {number} | {fault.what} | `{fault.file}` | `{fault.test.removeprefix('tests/')}` |"
        for number, fault in enumerate(FAULTS, 1)
    ]
    return "\n".join(["| | fault | in | caught by |", "|---|---|---|---|", *rows])


def main() -> int:
    """Return the exit code: 0 if every fault was caught."""
    parser = argparse.ArgumentParser(description="Apply known faults to a copy of the tree, and show that tests catch them.")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="numbers of the faults", choices=range(1, len(FAULTS) + 1)
    )
    parser.add_argument("--list", action="store_true", help="print the faults as a table")
    arguments = parser.parse_args()
    if arguments.list:
        print(table())
        return 0
    missed = show(arguments.only or range(1, len(FAULTS) + 1))
    print(f"{missed} not caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
