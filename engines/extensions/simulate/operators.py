"""Operators of the simulated device: attention by the kernel that PyTorch chooses on CUDA, and autocast as on CUDA."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
LARGEST_HEAD = 256  # largest head dimension of FlashAttention
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
_library: list[Library] = []  # kept alive, because a freed library unregisters its kernels


def register() -> None:
    """Register the kernels of attention and of autocast; the latter cast the arguments and call the operation again."""
    everything, library = Library("_", "IMPL"), Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", run_attention, key)
    everything.fallback(torch.library.fallthrough_kernel, KEY)  # all other operations are not cast
    for name in LOWER.split():
        library.impl(name, _make_cast(name, lambda: torch.get_autocast_dtype("simulated")), KEY)
    for name in FLOAT32.split():
        library.impl(name, _make_cast(name, lambda: torch.float32), KEY)
    _library.extend((everything, library))


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by FlashAttention in half precision without a mask, else by the memory-efficient kernel.

    Neither stores the scores. Arguments that neither accepts go to the plain formula, as on CUDA. The arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    heads, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if query.dim() != 4 or not all(t.dtype == query.dtype for t in (key, value)):
        return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    scale = heads**-0.5 if scale is None else scale
    multiple = 8 if half else 4
    if padding := -heads % multiple:  # the kernels require a multiple of 16 bytes, so PyTorch pads the heads
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    if half and attn_mask is None and heads <= LARGEST_HEAD:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        bias = None if attn_mask is None else _to_bias(attn_mask, query, key)
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        kernel = aten._scaled_dot_product_efficient_attention
        out = kernel(query, key, value, bias, needs, dropout_p, is_causal, scale=scale)[0]
    return out[..., :heads] if padding else out


def _to_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as a bias of the scores, `[..., queries, keys]`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _make_cast(name: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    """Return a kernel that casts floating-point tensors on the device and calls an operation."""
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
