"""The numbers of structure.py stay within its bounds; one that has fallen takes its bound with it."""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "structure.py"
STRUCTURE = runpy.run_path(str(FILE))
BOUNDS: dict[str, int] = STRUCTURE["BOUNDS"]


def test_the_files_stay_within_their_bounds() -> None:
    found = STRUCTURE["bound_tree"]()
    assert {name: number for name, number in found.items() if number > BOUNDS[name]} == {}


def test_a_name_of_two_classes_is_counted_once() -> None:
    """Private ones are the matter of their file."""
    files = {path: ast.parse("class A: ...\nclass _B: ...") for path in ("one.py", "two.py")}
    assert STRUCTURE["shared_names"](files | {"three.py": ast.parse("class C: ...")}) == ["A"]


@pytest.mark.long
def test_an_update_stays_within_its_bounds() -> None:
    """And what has a bound is measured."""
    command = [sys.executable, "-P", str(FILE), "--bounds"]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: number for name, number in found.items() if number > BOUNDS[name]} == {}
    assert {*found, *STRUCTURE["bound_tree"]()} == {*BOUNDS}
