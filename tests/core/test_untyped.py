"""Start the session without run-time type checks, which some files need, in whole or in part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("core/test_compile.py", "core/test_checks.py", "kernels/test_dispatch.py", "bench/test_kernels.py")


@pytest.mark.skipif(os.environ.get("FLUVIAL_NO_TYPECHECK") == "1", reason="this is that session")
@pytest.mark.parametrize("name", FILES)
def test_passes_in_a_session_without_type_checks(name: str, pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests / name)]
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
