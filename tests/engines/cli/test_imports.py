"""Which libraries a command imports, a training run before its first update: each costs every rank up to a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.marks import long

# The first update, or the end of another command, prints the modules and ends the process.
CODE = """
import json, os, sys
from fluvial.engines.cli import main

leave = os._exit
def end(code):
    print(json.dumps(sorted(sys.modules)), flush=True)
    leave(code)

os._exit = end
if "--out" in sys.argv:
    from fluvial.engines.run.loop import Loop
    Loop.update = lambda self: end(0)
main.main(sys.argv[1:])
"""
SMALL = "--final-samples 4 --micro-batch 4 --sampling.prompts 1 --sampling.group 4 --out OUT"
# scikit-learn fits recognisers, whose results are shipped, and charts are drawn at the end of a run.
RUN = "sklearn", "matplotlib", "pyarrow", "starlette", "tensordict", "onnxruntime"
SETTINGS = *RUN, "scipy", "diffusers", "transformers", "peft", "torch.distributed.fsdp", "torch.distributed.checkpoint"
HELP = *SETTINGS, "tensorboard", "triton", "sympy", "torch._dynamo", "torch.distributed.tensor", "rich.console"
HEAVY = "torch", "triton", "numpy", *SETTINGS
COMMANDS = {
    f"train ddpo {SMALL}": RUN,  # `make train`
    "config ddpo": SETTINGS,
    "train grpo --help": HELP,
    **dict.fromkeys(("--help", "--version", "train --help", "rewards", "runs"), HEAVY),
    "models": HEAVY,
}


@pytest.mark.parametrize(
    "command", [long(command) if "ddpo" in command or "grpo" in command else command for command in COMMANDS]
)
def test_a_command_imports_only_what_it_uses(command: str, tmp_path: Path) -> None:
    """In a process of its own, as a person starts one; of a run, after the first evaluation and its record."""
    given = [str(tmp_path / "run") if word == "OUT" else word for word in command.split()]
    environment = {**os.environ, "FLUVIAL_NO_TYPECHECK": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", CODE, *given], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "fluvial.engines.cli.main" in modules
    assert ("diffusers" in modules) == ("OUT" in command)
    assert modules & set(COMMANDS[command]) == set()
