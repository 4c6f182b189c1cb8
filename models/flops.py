"""Floating-point operations of a network's forward and backward passes.

Operations that activation checkpointing recomputes are not the model's (Chowdhery et al., arXiv 2204.02311, appendix B), so
they are counted separately.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten

# FLOPs per operation by PyTorch's formulas, which leave out the CPU's attention kernels.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


class FlopCounter(TorchDispatchMode):
    """Counter of the floating-point operations of matrix products, convolutions and attention while the mode is on.

    The product of an `m x k` and a `k x n` matrix counts 2 m k n. A linear layer's backward pass counts the same for the
    gradient of its weight, if trained, and for the gradient of its input, if needed. Operations on sharded tensors count as
    computed by this rank. Elementwise operations and custom kernels, fluvial's included, count 0. PyTorch's formula for
    fused attention counts the scores again in the backward pass, because its kernels recompute them.
    PyTorch's `FlopCounterMode` decomposes operations that have a kernel, such as `silu_backward`, and so changes bits.

    Attributes:
        model: operations of the forward and backward passes.
        recomputed: operations that activation checkpointing repeats in backward passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = self.recomputed = 0
        self._tracker = ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as operations on local tensors
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # computes only shapes, for an operation on sharded tensors
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None:
            if _has_kernel(func):
                return func(*args, **kwargs)
            with self:  # a composite operation, which inference mode does not decompose
                decomposed = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if decomposed is NotImplemented else decomposed
        out = func(*args, **kwargs)
        flops = int(formula(*args, **kwargs, out_val=out))
        if self._tracker.is_bw and _is_recomputing():
            self.recomputed += flops
        else:
            self.model += flops
        return out


def _is_recomputing() -> bool:
    """Return whether a backward pass is recomputing a part of the forward pass.

    A backward pass itself records no gradients and saves no tensors. The forward pass of an `autograd.Function` records no
    gradients either, but checkpointing's hooks for saved tensors are in place around it.
    """
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def _has_kernel(func: Any) -> bool:
    """Return whether an operation has its own kernel; decomposed it would round differently."""
    if func.namespace == "prim":  # e.g. reads a tensor's device
        return True
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
