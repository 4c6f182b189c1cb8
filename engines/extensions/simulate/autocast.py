"""Autocast on the simulated device, with the lists of operations that PyTorch has for CUDA."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
KEY = "AutocastPrivateUse1"
# aten/src/ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32, as far as diffusion models use them.
LOWER = """
conv1d conv2d conv3d convolution linear matmul mm mv bmm addmm addmv addbmm baddbmm einsum prelu scaled_dot_product_attention
"""
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
softplus layer_norm native_layer_norm group_norm norm.Scalar cosine_similarity mse_loss l1_loss nll_loss cumprod cumsum dist
renorm logsumexp
"""
_library: list[Library] = []  # kept alive, because its kernels go with it


def register() -> None:
    """Register kernels that cast and call the operation again; the others are left as they are."""
    everything = Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, KEY)
    library = Library("aten", "IMPL")
    for name in LOWER.split():
        library.impl(name, _cast(name, lambda: torch.get_autocast_dtype("simulated")), KEY)
    for name in FLOAT32.split():
        library.impl(name, _cast(name, lambda: torch.float32), KEY)
    _library.extend((everything, library))


def _cast(name: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    """Return a kernel that casts floating-point tensors on the device, and calls an operation."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        to = dtype()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            moves = tensor.is_floating_point() and tensor.device.type == "simulated" and tensor.dtype != torch.float64
            return tensor.to(to) if moves else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return function(*args, **kwargs)

    return kernel
