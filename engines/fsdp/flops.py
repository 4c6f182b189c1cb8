"""Floating-point operations of forward and backward passes, of any module, and what part of the device's peak they are.

MFU = model FLOPs / (seconds * peak * ranks). What activation checkpointing computes again is not the model's (Chowdhery et
al., arXiv 2204.02311, appendix B), so it is counted apart.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten

# An operation's FLOPs, by PyTorch's formulas; it has none for the attention kernels of the CPU.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations of matrix products, convolutions and attention while the mode is on.

    A product of an `m x k` and a `k x n` matrix is 2 m k n. Of a linear layer the backward pass costs that for the weight's
    gradient, if it is trained, and that for the input's, if one is asked for. Operations on sharded tensors are counted as
    this rank computes them. Elementwise work and custom kernels (fluvial's own) count nothing. PyTorch's formula of fused
    attention counts the scores once more in the backward pass, because its kernels compute them again.

    Attributes:
        model: operations of the forward and backward passes.
        recomputed: operations of the backward passes that activation checkpointing runs a second time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = self.recomputed = 0
        self._where = ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back here as operations on its local tensors
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # only asks for shapes, on behalf of an operation on sharded tensors
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None:
            if _has_kernel(func):
                return func(*args, **kwargs)
            with self:  # an operation that is made of others, as inference mode leaves them
                decomposed = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if decomposed is NotImplemented else decomposed
        out = func(*args, **kwargs)
        flops = int(formula(*args, **kwargs, out_val=out))
        # A backward pass takes no gradients of its own: what runs in it with gradients on is a forward pass once more.
        if self._where.is_bw and torch.is_grad_enabled():
            self.recomputed += flops
        else:
            self.model += flops
        return out


@cache
def _has_kernel(func: Any) -> bool:
    """Whether an operation has code of its own: taken apart it would round differently, and counting must change no bit."""
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


class Peak(NamedTuple):
    """FLOP/s of a device at its highest clock, dense (without 2:4 sparsity)."""

    bfloat16: float  # on its matrix units, accumulated in float32
    float32: float  # in full precision: no TF32


# By the words that a device's name holds, as CUDA and ROCm spell it; of rows that fit, the one with the most words counts.
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
# A part of a GPU, or another GPU of nearly the same name: nothing is known of it.
OTHERS = {"MIG", "Laptop", "D", "Ti", "Max-Q"}


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a device of a name, in a dtype; None where it is not known."""
    words = set(re.split(r"[\s-]+", name))
    rows = [row for row in PEAKS if set(row.split()) <= words]
    if not rows or words & OTHERS:
        return None
    best = PEAKS[max(rows, key=lambda row: len(row.split()))]
    return {torch.bfloat16: best.bfloat16, torch.float16: best.bfloat16, torch.float32: best.float32}.get(dtype)


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of a device in a dtype; None where it is not known (a CPU)."""
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def mfu(flops: float, seconds: float, *, peak: float, ranks: int) -> float:
    """Return model FLOPs utilisation: flops / (seconds * peak * ranks).

    Args:
        flops: of the model in that time, over all ranks, without what was recomputed.
        seconds: that they took.
        peak: FLOP/s of one rank's device.
        ranks: devices.

    Raises:
        ValueError: seconds, peak or ranks are not above 0.
    """
    for name, number in {"seconds": seconds, "peak": peak, "ranks": ranks}.items():
        if not number > 0:
            raise ValueError(f"mfu: {name} is {number}, expected above 0")
    return flops / (seconds * peak * ranks)
