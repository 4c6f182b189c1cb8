"""Peaks of devices by name and dtype, and MFU."""

from typing import Any

import pytest
import torch

from fluvial.engines.run import metrics as mfu

# Peaks in bfloat16, in TFLOP/s; a name that only looks alike has none.
KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989.4,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    **dict.fromkeys(("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "Tesla T4")),
}


def test_peaks_and_the_part_of_them_that_is_used() -> None:
    """They go by the device's name and dtype, and the part is over all ranks; a wrong number is refused."""
    for name, peak in KNOWN.items():
        assert mfu.peak_of(name, torch.bfloat16) == (None if peak is None else pytest.approx(peak * 1e12)), name
    for name, row in mfu.PEAKS.items():
        assert row.float32 < row.bfloat16, name
        assert mfu.peak_of(name, torch.float32) == row.float32
        assert mfu.peak_of(name, torch.float64) is None
    assert mfu.peak(torch.device("cpu"), torch.float32) is None
    assert mfu.mfu(6e12, 2.0, peak=1e12, ranks=4) == pytest.approx(0.75)
    for wrong in ({"seconds": 0.0}, {"peak": -1.0}, {"ranks": 0}, {"peak": float("nan")}):
        numbers: dict[str, Any] = {"seconds": 1.0, "peak": 1.0, "ranks": 1, **wrong}
        with pytest.raises(ValueError, match=f"mfu: {next(iter(wrong))} is"):
            mfu.mfu(1.0, **numbers)
