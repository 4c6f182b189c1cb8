"""The command that compares the bits of two trees: it notices a changed learning rate, and nothing where nothing changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPARED = """
import sys
from dataclasses import replace
sys.path[:0] = [{here!r}]
import digests

def faster(folder):
    table = known(folder)
    config = table["sft"].config
    table["sft"] = table["sft"]._replace(config=replace(config, optimizer=replace(config.optimizer, lr=1.1e-3)))
    return table

runs = ["sft", "dpo-file", "--ranks", "2"]
assert digests.main(["--record", {file!r}, *runs]) == 0
known, digests.cases = digests.cases, faster
assert digests.main(["--compare", {file!r}, *runs]) == 1
"""


@pytest.mark.long
def test_a_changed_learning_rate_is_noticed(tmp_path: Path) -> None:
    """In weights, state and metrics of the run that has it, and not in the other run."""
    code = COMPARED.format(here=str(HERE), file=str(tmp_path / "record.json"))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    words = [line[3] for line in lines if line[0] in ("sft", "dpo-file")]
    assert words == ["recorded", "recorded", "DIFFERS:", "equal"]
    assert "DIFFERS: weights, state, metrics" in done.stdout
    assert "first update 1.lr: 0.001 -> 0.0011" in done.stdout
