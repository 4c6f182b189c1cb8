"""`--processes N`: the same command on the processes of this machine."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import launch
from safetensors.torch import load_file

from fluvial.engines.cli import main as cli
from fluvial.engines.cli import processes


def typed(command: str) -> tuple[int, list[str]]:
    """Return what a command line asks for."""
    return processes.split(command.split())


def test_the_flag_is_taken_from_the_command_line() -> None:
    """In either form, anywhere; commands without ranks keep it, and complain."""
    assert typed("train ddpo --seed 1") == (1, ["train", "ddpo", "--seed", "1"])
    assert typed("train ddpo --processes 3 --seed 1") == (3, ["train", "ddpo", "--seed", "1"])
    assert typed("eval runs/x --seed 1 --processes=2") == (2, ["eval", "runs/x", "--seed", "1"])
    assert typed("sample words --processes 2") == (1, ["sample", "words", "--processes", "2"])
    assert typed("") == (1, [])


@pytest.mark.parametrize(("cores", "gpus", "count"), [(1, 0, 1), (2, 0, 2), (64, 0, 2), (64, 1, 1), (64, 8, 8)])
def test_auto_is_a_process_per_gpu(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, count: int) -> None:
    """Without GPUs two, where there are two cores."""
    monkeypatch.setattr(processes, "count_cores", lambda: cores)
    monkeypatch.setattr(processes, "_has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert typed("train ddpo --processes auto") == (count, ["train", "ddpo"])


def test_several_processes_start_no_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under torchrun the flag is refused."""
    monkeypatch.setenv("RANK", "0")
    assert cli.run(["train", "ddpo", "--processes", "2"]) == 2
    assert "--processes is 2, but this process already is one of several" in launch.one_line(capsys.readouterr().err)


def test_ranks_run_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its exit code; help, and one process, need no ranks."""
    started = list[tuple[list[str], int]]()

    def launched(command: list[str], count: int) -> int:
        started.append((command, count))
        return 130

    monkeypatch.setattr(processes, "launch", launched)
    assert cli.run(["train", "ddpo", "--processes", "2", "--seed", "1"]) == 130
    assert started == [([sys.executable, "-P", "-m", "fluvial.engines", "train", "ddpo", "--seed", "1"], 2)]
    assert cli.run(["train", "ddpo", "--processes", "2", "--help"]) == 0
    assert cli.run(["train", "nothing", "--processes", "1"]) == 2
    assert "--updates" in capsys.readouterr().out
    assert len(started) == 1


@pytest.mark.long
def test_two_processes_train_stop_and_go_on(tmp_path: Path) -> None:
    """Ctrl-C saves and exits with 0, and the weights are those of the run on two ranks without a stop, to the bit."""
    flags = ["--updates", "3", "--checkpoint.every", "9"]
    launch.train(tmp_path / "straight", *flags, ranks=2)
    line = ["train", "handwriting", "--out", str(tmp_path / "run"), *launch.SMALL, *flags, "--processes", "2"]
    with launch.start(*line) as process:
        metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and '"reward"' in metrics.read_text()):
            assert process.poll() is None, process.stdout + process.stderr
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, process.stderr
        done = re.search(r"SIGINT: stopped after update (\d), all saved", process.stdout)
        assert done, process.stdout
        assert int(done[1]) in (1, 2)
    with launch.start(*line, "--resume") as process:  # as new processes: forked ones have a smaller probe
        assert process.wait(120) == 0, process.stderr
    left, right = (
        load_file(tmp_path / name / "weights" / "diffusion_pytorch_model.safetensors") for name in ("straight", "run")
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("command", ["runs", "--help", "models"])
def test_output_that_nobody_reads_ends_a_command_silently(command: str) -> None:
    """As in `fluvial runs | head -n 1`: `head` closes the pipe, and the command says nothing of it."""
    program = [sys.executable, "-P", "-m", "fluvial.engines", command]
    closed, end = os.pipe()
    os.close(closed)
    try:
        done = subprocess.run(program, stdout=end, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(end)
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))


def test_a_lost_connection_is_an_error_while_output_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    """Only a pipe behind standard output is silent."""

    def command(args: list[str]) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert cli.run([], command) == 1
    assert "Broken pipe" in capfd.readouterr().err


SENT = """
import os, signal, sys, time
from fluvial.engines.cli.main import exit_with
def command(args):
    {}
exit_with(command, [])
"""
SWALLOWED = """try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("initialization failed")"""


@pytest.mark.parametrize(
    ("body", "code"),
    [("os.kill(os.getpid(), signal.SIGINT)", 130), ("os.kill(os.getpid(), signal.SIGTERM)", 143), (SWALLOWED, 130)],
    ids=["interrupted", "terminated", "swallowed"],
)
def test_a_signal_in_the_first_seconds_ends_with_a_line(body: str, code: int) -> None:
    """Before a command handles signals itself, also within an import that makes another error of it."""
    command = [sys.executable, "-P", "-c", SENT.format(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    name = signal.Signals(code - 128).name
    assert launch.one_line(done.stderr) == f"fluvial: {name}: stopped at once; everything saved so far is unchanged"
