"""Start the session in Triton's interpreter, which has to be chosen before the kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that session")
def test_the_kernels_pass_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(Path(__file__).parent / "test_fused.py")],
        cwd=pytestconfig.rootpath,
        # Without run-time type checks, which no compiled graph can hold.
        env=os.environ | {"TRITON_INTERPRET": "1", "FLUVIAL_NO_TYPECHECK": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
