"""The list of known faults (mutate.py) fits the code: its texts and tests are there."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MUTATE = runpy.run_path(str(ROOT / "tests" / "mutate.py"))


@pytest.mark.parametrize("fault", MUTATE["FAULTS"], ids=lambda fault: fault.what)
def test_a_known_fault_can_be_applied(fault: Any) -> None:
    """Its text occurs once in its file, and the test that catches it is there."""
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    file, _, name = fault.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()  # a test may be one case of a table
