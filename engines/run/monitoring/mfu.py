"""Peaks of devices, and model FLOPs utilisation (MFU).

MFU = model FLOPs / (seconds * peak * ranks), without operations that activation checkpointing computes again (Chowdhery et
al., arXiv 2204.02311, appendix B).
"""

import re
from typing import NamedTuple

import torch

from fluvial.models.device import is_accelerator


class Peak(NamedTuple):
    """FLOP/s of a device at its highest clock, dense (without 2:4 sparsity)."""

    bfloat16: float  # on its matrix units, accumulated in float32
    float32: float  # in full precision: no TF32


# By words of a device's name as CUDA and ROCm spell it; of the rows that fit, the one with the most words counts.
# Source: the vendors' data sheets. NVIDIA: A100, A10, A40, RTX A6000, L4, L40, L40S, H100, H200, GH200 and HGX B200 product
# data sheets (which print most bfloat16 numbers with sparsity: twice these), and the architecture white papers of Ampere
# GA102, Ada and RTX Blackwell for GeForce. AMD: Instinct MI300X and MI325X data sheets.
PEAKS: dict[str, Peak] = {
    "A10": Peak(125e12, 31.2e12),
    "A40": Peak(149.7e12, 37.4e12),
    "RTX A6000": Peak(154.8e12, 38.7e12),
    "A100": Peak(312e12, 19.5e12),
    "A800": Peak(312e12, 19.5e12),
    "L4": Peak(121e12, 30.3e12),
    "L40": Peak(181.05e12, 90.5e12),
    "L40S": Peak(362.05e12, 91.6e12),
    "H100": Peak(989.4e12, 66.9e12),
    "H100 PCIe": Peak(756e12, 51e12),
    "H100 NVL": Peak(835.5e12, 60e12),
    "H800": Peak(989.4e12, 66.9e12),
    "H200": Peak(989.4e12, 66.9e12),
    "H200 NVL": Peak(835.5e12, 60e12),
    "GH200": Peak(989.4e12, 66.9e12),
    "B200": Peak(2250e12, 75e12),
    "RTX 3090": Peak(71e12, 35.6e12),
    "RTX 4090": Peak(165.2e12, 82.6e12),
    "RTX 5090": Peak(209.5e12, 104.8e12),
    "MI300X": Peak(1307.4e12, 163.4e12),
    "MI325X": Peak(1307.4e12, 163.4e12),
}
# Words that name a part of a GPU, or a GPU of nearly the same name: their peaks are not known.
OTHERS = {"MIG", "Laptop", "D", "Ti", "Max-Q"}


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of the device of this name in a dtype, None if it is not known."""
    words = set(re.split(r"[\s-]+", name))
    rows = [row for row in PEAKS if set(row.split()) <= words]
    if not rows or words & OTHERS:
        return None
    best = PEAKS[max(rows, key=lambda row: len(row.split()))]
    return {torch.bfloat16: best.bfloat16, torch.float16: best.bfloat16, torch.float32: best.float32}.get(dtype)


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a device in a dtype, None if it is not known, as for a CPU."""
    return peak_of(torch.get_device_module(device).get_device_name(device), dtype) if is_accelerator(device) else None


def mfu(flops: float, seconds: float, *, peak: float, ranks: int) -> float:
    """Return model FLOPs utilisation: flops / (seconds * peak * ranks).

    Args:
        flops: operations of the model on all ranks, without recomputed ones.
        peak: FLOP/s of one rank's device.

    Raises:
        ValueError: seconds, peak or ranks are not above 0.
    """
    for name, number in {"seconds": seconds, "peak": peak, "ranks": ranks}.items():
        if not number > 0:
            raise ValueError(f"mfu: {name} is {number}, expected above 0")
    return flops / (seconds * peak * ranks)
