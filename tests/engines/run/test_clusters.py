"""Scripts of `engines/run/README.md` as their parsers read them, and a run on a local Ray."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fluvial.engines.cli.parse import field_names
from fluvial.engines.cli.serve import ServeConfig
from fluvial.engines.train import recipes

README = Path(__file__).parents[3] / "engines" / "run" / "README.md"
# Two ranks train on samples of one server; the summary says that its log-probs were the trainer's.
ON_RAY = """
import sys
import ray
from fluvial.engines.run import on_ray

ray.init(num_cpus=4)
train = sys.argv[1].split()
on_ray.run(train, ["handwriting"], ranks=2, servers=1, gpus=False)
"""
SMALL = (
    "grpo --updates 2 --minibatches 1 --micro-batch 4 --eval-every 0 --eval-samples 8 --final-samples 8 --rollout.prompts 2 "
    "--rollout.group 4 --rollout.steps 4 --rollout.window random --rollout.window.size 2 --rollout.window.high 3"
)


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def scripts() -> list[str]:
    """Return all shell scripts: blocks, and the parts of SkyPilot's file."""
    (task,) = map(yaml.safe_load, blocks("yaml"))
    return [*blocks("bash"), task["setup"], task["run"]]


def test_scripts_are_read_by_bash(tmp_path: Path) -> None:
    found = scripts()
    assert len(found) == 4
    for script in found:
        (tmp_path / "script").write_text(script)
        done = subprocess.run(["bash", "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_flags_in_scripts_are_fluvials() -> None:
    """Those after `fluvial serve` and `fluvial.engines train grpo`, up to the end of the command."""
    flags = {"serve": field_names(ServeConfig()), "train": field_names(recipes.grpo("handwriting"))}
    known = {name: {f"--{each.replace('_', '-')}" for each in names} | {"--async.ahead"} for name, names in flags.items()}
    counted = 0
    for script in scripts():
        text = script.replace("\\\n", " ")
        for command, rest in re.findall(r"(?:fluvial|fluvial\.engines) (serve|train)\b([^\n&]*)", text):
            used = {word for word in re.split(r"[\s'\"]+", rest) if word.startswith("--")}
            assert used <= known[command]
            counted += len(used)
    assert counted > 15


def test_skypilots_file_and_slurms_options_are_well_formed() -> None:
    (task,) = map(yaml.safe_load, blocks("yaml"))
    assert task.keys() == {"name", "workdir", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    (slurm,) = (script for script in blocks("bash") if "#SBATCH" in script)
    lines = slurm.splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert lines[1 : 1 + len(options)] == options  # sbatch reads no option after the first command
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", option) for option in options)


@pytest.mark.long
def test_a_run_on_a_local_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    train = shlex.join([*SMALL.split(), "--out", str(tmp_path / "run")])
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-c", ON_RAY, train]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["updates"], summary["train_samples"], summary["first_pass_max_abs_log_ratio"]) == (2, 16, 0.0)
    source = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "http://127.0.0.1:" in json.dumps(source)
