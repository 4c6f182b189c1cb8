"""Floating-point operations of a network's forward and backward passes.

Operations that activation checkpointing computes again are not the model's (Chowdhery et al., arXiv 2204.02311, appendix B),
so they are counted separately.
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
    """Count the floating-point operations of matrix products, convolutions and attention while the mode is on.

    The product of an `m x k` and a `k x n` matrix counts 2 m k n. A linear layer's backward pass counts as much for the
    gradient of its weight, if that is trained, and for that of its input, if that is needed. Operations on sharded tensors
    count as this rank computes them. Elementwise work and custom kernels (fluvial's own) count 0. PyTorch's formula for
    fused attention counts the scores once more in the backward pass, because its kernels compute them again.
    PyTorch's own `FlopCounterMode` takes apart operations that have a kernel, such as `silu_backward`, and so changes bits.

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
            return NotImplemented  # it returns here as operations on local tensors
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # computes shapes only, for an operation on sharded tensors
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None:
            if _has_kernel(func):
                return func(*args, **kwargs)
            with self:  # a composite operation, which inference mode does not take apart
                decomposed = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if decomposed is NotImplemented else decomposed
        out = func(*args, **kwargs)
        flops = int(formula(*args, **kwargs, out_val=out))
        if self._where.is_bw and _in_forward():
            self.recomputed += flops
        else:
            self.model += flops
        return out


def _in_forward() -> bool:
    """Return whether a backward pass is computing a part of the forward pass again.

    A backward pass itself records no gradients and saves no tensors. The forward pass of an `autograd.Function` records none
    either, but checkpointing's hooks for saved tensors are in place around it.
    """
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def _has_kernel(func: Any) -> bool:
    """Return whether an operation has its own kernel. Taken apart it would round differently."""
    if func.namespace == "prim":  # asks a tensor for its device
        return True
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
