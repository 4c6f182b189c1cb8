"""Start the session without run-time type checks, which test_compile.py and test_checks.py need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_compile.py", "test_checks.py")


@pytest.mark.skipif(os.environ.get("FLUVIAL_NO_TYPECHECK") == "1", reason="this is that session")
@pytest.mark.parametrize("name", FILES)
def test_passes_in_a_session_without_type_checks(name: str, pytestconfig: pytest.Config) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / name)]
    result = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=os.environ | {"FLUVIAL_NO_TYPECHECK": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
