"""The kernel benchmarks: rows of every provider, and counts that show what fusing is for."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.bench import kernels, operations, traffic
from fluvial.bench.kernels import KernelsConfig
from fluvial.bench.operations import OPERATIONS
from fluvial.kernels.fused import rows


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_fused_operation_moves_what_must_move(operation: operations.Operation) -> None:
    """Each operand once forward and once backward, in one launch per pass or two, and nothing of that size is saved.

    The premise: eager mode needs a dozen launches or more, and temporaries of the samples' size.
    """
    backward = 1 if operation.gradients else 0
    for launches in (1, 2):
        with rows.launches(launches):
            fused = traffic.count(operation, "fused")
        assert fused.moved_bytes == pytest.approx(fused.must_move_bytes, rel=0.001)
        assert fused.launches == launches + backward
    assert fused.saved_bytes < 1000
    eager = traffic.count(operation, "eager")
    assert eager.moved_bytes > 2.5 * eager.must_move_bytes
    assert eager.launches >= 8


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("FLUVIAL_NO_TYPECHECK") != "1", reason="a graph holds no run-time type checks")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_the_benchmark_writes_rows_and_images(tmp_path: Path) -> None:
    """Every provider of a CPU, in every mode, beside a copy of the same bytes."""
    config = KernelsConfig(
        device="cpu", batches=(2,), shapes=("handwriting",), operations=("velocity_error", "sde_step"), runs=2, out=tmp_path
    )
    rows = kernels.run(config)
    assert {(r.op, r.mode, r.provider) for r in rows} == {
        (op, mode, provider)
        for op, modes in (("velocity_error", kernels.MODES), ("sde_step", kernels.MODES[:1]))
        for mode in modes
        for provider in ("reference", "compiled", "loop", "copy")
    }
    assert all(row.of_copy == pytest.approx(1) for row in rows if row.provider == "copy")
    with (tmp_path / "kernels.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert all((tmp_path / f"kernels-cpu-{name}.png").stat().st_size > 5000 for name in ("bandwidth", "time"))


def test_what_is_not_there_is_refused() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "shapes is 'SD9', expected one of 'handwriting'": {"shapes": ("SD9",)},
        "operations is 'conv', expected one of 'step_log_prob'": {"operations": ("conv",)},
        "runs is 0": {"runs": 0},
    }
    if not torch.cuda.is_available():
        wrong["device is cuda, and there is none here"] = {"device": "cuda"}
    for message, settings in wrong.items():
        with pytest.raises(ValueError, match=message):
            KernelsConfig(**{"device": "cpu", **settings})
