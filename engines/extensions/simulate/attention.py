"""Attention on the simulated device: the kernel that PyTorch would choose on CUDA, by its dtype, mask and head size."""

import torch
from torch import Tensor
from torch.library import Library

aten = torch.ops.aten
_library: list[Library] = []  # kept alive, because its kernels go with it
LARGEST_HEAD = 256  # of FlashAttention


def register() -> None:
    """Register the kernels of `scaled_dot_product_attention` for the device, with and without gradient."""
    library = Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", attention, key)
    _library.append(library)


def attention(
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

    Neither keeps the scores. Arguments that neither takes go to the plain formula, as on CUDA. The arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    heads, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if query.dim() != 4 or not all(t.dtype == query.dtype for t in (key, value)):
        return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    scale = heads**-0.5 if scale is None else scale
    multiple = 8 if half else 4
    if padding := -heads % multiple:  # the kernels take heads of a multiple of 16 bytes, so PyTorch pads them
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    if half and attn_mask is None and heads <= LARGEST_HEAD:
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        kernel = aten._scaled_dot_product_efficient_attention
        out = kernel(query, key, value, bias, needs, dropout_p, is_causal, scale=scale)[0]
    return out[..., :heads] if padding else out


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as what is added to the scores, which are `[..., queries, keys]`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])
