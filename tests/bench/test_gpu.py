"""The parts that a lent GPU runs, on the CPU with a tiny model, so that they still work when one is there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.bench import harness
from fluvial.bench.gpu import parts as gpu
from fluvial.bench.gpu import programs
from fluvial.bench.gpu.config import GpuConfig, GpuRow, Rows
from fluvial.engines.errors import RunError

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu-first` and `make gpu-second` run the parts"),
]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each part in this process, so that the tests' replacements act in it."""
    monkeypatch.setattr(harness, "run_in_processes", lambda function, *arguments, limit: function(*arguments))


def parts(out: Path, *names: str) -> list[GpuRow]:
    ended = gpu.run(GpuConfig(parts=names, limit=10, out=out))  # type: ignore[arg-type]
    assert {row.part: row.note for row in ended} == dict.fromkeys(names, "done")
    return read(out)


def read(out: Path) -> list[GpuRow]:
    return [GpuRow(**json.loads(line)) for line in (out / "gpu.jsonl").read_text().splitlines()]


VISITS = {"first": "smoke train tests nccl", "second": "kernels networks compile published update invariance"}


@pytest.mark.parametrize("visit", VISITS)
def test_a_visit_runs_from_a_plain_folder(tmp_path: Path, visit: str) -> None:
    """Without an installation; each part ends well, in the order of the visit, and the log is whole."""
    names = VISITS[visit].split()
    for name in ("core", "kernels", "engines", "models", "bench", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    changes = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "ARGS": "--limit 10", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run(["sh", "bench/gpu/visit.sh", visit], cwd=tmp_path, env={**os.environ, **changes}, check=True)
    rows = read(tmp_path / "out")
    assert [(row.part, row.note) for row in rows if row.what == "part"] == [(name, "done") for name in names]
    assert (tmp_path / "out" / "log").read_text().count("part, all") == len(names)


def test_a_kernel_that_is_wrong_fails_the_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = programs._compute_values_and_gradients

    def wrong(*arguments: Any) -> list[Tensor]:
        return [result * (1 if result.dtype == torch.float64 else 1.001) for result in real(*arguments)]

    monkeypatch.setattr(programs, "_compute_values_and_gradients", wrong)
    config = GpuConfig(parts=("smoke",), out=tmp_path)
    with pytest.raises(RunError, match=r"velocity_error, reference, 3 x \(1271,\), value: 0.001"):
        programs.compare_kernels(config, Rows(config, "smoke"), 0.0)


def test_a_run_far_from_the_cpus_is_said(tmp_path: Path) -> None:
    config = GpuConfig(parts=("train",), out=tmp_path)
    for name, reward, ratio in (("cpu", 0.5, 0.0), ("bfloat16", 0.6, 1e-6), (programs.COMPILED, 0.51, 1e-4)):
        (tmp_path / name).mkdir()
        record = {"loss": 0.0, "update": 1, "seconds": {}, "reward": {"mean": reward}, "first_pass_max_abs_log_ratio": ratio}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    ended = subprocess.Popen(["true"])

    def problems(name: str) -> list[str]:
        return programs._compare_run(name, ended, tmp_path, Rows(config, "train"))

    assert problems("bfloat16") == [
        "bfloat16, update 1: the first |log ratio| is 1e-06, expected 0",
        "bfloat16: a mean reward is 0.1 from the CPU's",
    ]
    assert problems(programs.COMPILED) == []


def test_updates_agree_with_their_rollouts(tmp_path: Path) -> None:
    """LoRA and full, in bfloat16 through FSDP2, with the rollout's micro-batch and with half of it."""
    rows = parts(tmp_path, "update")
    ratios = [row for row in rows if row.what.startswith("first |log ratio|")]
    assert [row.value for row in ratios if "4 items" in row.setting] == [0.0] * 4
    assert len(ratios) == 8


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_updates_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are made in the first updates of each micro-batch, and none when one comes again."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend="eager"))
    rows = parts(tmp_path, "compile")
    programs = [row.value for row in rows if row.what == "compiled programs"]
    assert programs[0] > 0
    assert programs[1] == programs[3] == 0


def test_kernels_and_collectives(tmp_path: Path) -> None:
    """Times of the hot path, and collectives that give back what one rank has."""
    rows = parts(tmp_path, "kernels", "nccl")
    assert {row.setting.split(",")[0] for row in rows if row.part == "kernels"} >= {"reference", "loop", "copy"}
    assert [row.value for row in rows if "gives the numbers" in row.what] == [1.0] * 3


def test_invariance_names_an_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "alternate", lambda runs, work, warmup: {name: [0.0] for name in work})
    monkeypatch.setattr(gpu, "MODES", {"default": gpu.MODES["default"]})
    rows = parts(tmp_path, "invariance")
    fractions = {row.setting: row.value for row in rows if row.what.startswith("samples with the bits")}
    assert list(fractions) == [f"default, {batch} per pass" for batch in (4, 2, 1)]
    assert fractions["default, 4 per pass"] == 1
    assert len([row for row in rows if row.what.startswith("place of the first")]) == 2


def test_the_first_operation_that_depends_on_the_batch() -> None:
    """A sum over the batch is found, and operations on samples alone are not."""
    x = torch.arange(8.0).reshape(4, 2)

    def alone(count: int) -> Tensor:
        return (x[:count] + 1).exp()

    def together(count: int) -> Tensor:
        return (x[:count] + 1).exp() * x[:count].sum()

    assert gpu.find_first_difference(alone, small=1, large=4) == (0, "none")
    assert gpu.find_first_difference(together, small=1, large=4) == (4, "aten.mul.Tensor of [1, 2]")


def test_a_part_that_fails_or_hangs_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RunError("failed with code 1: RuntimeError: out of memory")

    monkeypatch.setitem(gpu.PARTS_BY_NAME, "kernels", broken)
    rows = gpu.run(GpuConfig(parts=("kernels", "nccl"), out=tmp_path))
    with pytest.raises(ValueError, match="device is cuda, and this machine has cpu"):
        GpuConfig(device="cuda")
    assert [row.note for row in rows] == ["failed with code 1: RuntimeError: out of memory", "done"]
