"""The parts that a lent GPU runs, on the CPU with a tiny model, so that they still work when one is there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fluvial.bench import gpu, harness
from fluvial.bench.gpu import GpuConfig, GpuRow
from fluvial.engines.errors import RunError

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="`make test-gpu` and `make bench-gpu` run the parts"),
]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each part in this process, so that the tests' replacements act in it."""
    monkeypatch.setattr(harness, "in_processes", lambda function, *arguments, limit: function(*arguments))


def parts(out: Path, *names: str) -> list[GpuRow]:
    """Return the rows of some parts, all of which must have ended well."""
    ended = gpu.run(GpuConfig(parts=names, limit=10, out=out))  # type: ignore[arg-type]
    assert {row.part: row.note for row in ended} == dict.fromkeys(names, "done")
    return harness.read(out / "gpu.csv", GpuRow)


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
    """Each mode compares every size of batch with the largest one."""
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

    assert gpu.first_difference(alone, small=1, large=4) == (0, "none")
    assert gpu.first_difference(together, small=1, large=4) == (4, "aten.mul.Tensor of [1, 2]")


def test_a_part_that_fails_or_hangs_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next part runs."""

    def broken(*_: object) -> None:
        raise RunError("failed with code 1: RuntimeError: out of memory")

    monkeypatch.setitem(gpu.PARTS_BY_NAME, "kernels", broken)
    rows = gpu.run(GpuConfig(parts=("kernels", "nccl"), out=tmp_path))
    assert [row.note for row in rows] == ["failed with code 1: RuntimeError: out of memory", "done"]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device is cuda, and this machine has cpu"):
        GpuConfig(device="cuda")
