"""Peaks of devices by name and dtype, and MFU."""

from typing import Any

import pytest
import torch

from fluvial.engines.run.monitoring import mfu


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_go_by_the_devices_name(name: str, expected: float | None) -> None:
    """A name that only looks alike has none."""
    assert mfu.peak_of(name, torch.bfloat16) == expected


def test_peaks_go_by_the_dtype() -> None:
    """Full precision is slower; of other dtypes, and of a CPU, nothing is known."""
    for name, row in mfu.PEAKS.items():
        assert row.float32 < row.bfloat16, name
        assert mfu.peak_of(name, torch.float32) == row.float32
        assert mfu.peak_of(name, torch.float64) is None
    assert mfu.peak(torch.device("cpu"), torch.float32) is None


def test_mfu_is_the_part_of_the_peak() -> None:
    """Over all ranks; a wrong number is refused."""
    assert mfu.mfu(6e12, 2.0, peak=1e12, ranks=4) == pytest.approx(0.75)
    for wrong in ({"seconds": 0.0}, {"peak": -1.0}, {"ranks": 0}, {"peak": float("nan")}):
        numbers: dict[str, Any] = {"seconds": 1.0, "peak": 1.0, "ranks": 1, **wrong}
        with pytest.raises(ValueError, match=f"mfu: {next(iter(wrong))} is"):
            mfu.mfu(1.0, **numbers)
