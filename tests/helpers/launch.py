"""A run of the built-in job that is small enough for a test, and ways to start it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Eight samples of four steps an update: a fraction of a second each.
SMALL = [
    *(
        "--rollout.prompts",
        "2",
        "--rollout.group",
        "4",
        "--rollout.steps",
        "4",
        "--rollout.window",
        "2",
        "--rollout.window-high",
        "4",
    ),
    *("--micro-batch", "4", "--eval-every", "0", "--final-samples", "8", "--eval-samples", "8", "--checkpoint-every", "2"),
    *("--optimizer.schedule", "constant"),  # a run whose last update can be moved
    *("--train", "full"),  # LoRA's import takes seconds; the tests that are about it ask for it
]


def fluvial(*args: str, ranks: int = 1, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in processes of its own."""
    return subprocess.run(command(*args, ranks=ranks), capture_output=True, text=True, timeout=timeout, env=environment())


def train(out: Path, *args: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Train the small run and expect it to succeed."""
    done = fluvial("train", "handwriting", "--out", str(out), *SMALL, *args, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def command(*args: str, ranks: int = 1) -> list[str]:
    """Return the argument list of a run on a number of ranks."""
    if ranks == 1:
        return [sys.executable, "-P", "-m", "fluvial.engines", *args]
    return [*launcher(ranks), "-m", "fluvial.engines", *args]


def launcher(ranks: int) -> list[str]:
    """Return the beginning of a torchrun command line."""
    return [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def script(path: Path, *args: str, ranks: int) -> None:
    """Run a script of the tests on a number of ranks, and expect it to succeed."""
    done = subprocess.run(
        [*launcher(ranks), str(path), *args],
        env=environment(helpers=True), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def environment(*, helpers: bool = False) -> dict[str, str]:
    """Return an environment in which one and several ranks use the same number of threads, and so the same kernels.

    Args:
        helpers: let a script that is run by its path import what lies beside this file.
    """
    path = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONSAFEPATH": "1"} if helpers else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **path}


def one_line(text: str) -> str:
    """Return the error line of a failed command, which must be the only thing on its standard error."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def weights(out: Path) -> bytes:
    """Return the exported weights of a run, to the bit."""
    return (out / "weights" / "diffusion_pytorch_model.safetensors").read_bytes()


def records(out: Path) -> Sequence[dict]:
    """Return the records of a run's metrics."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
