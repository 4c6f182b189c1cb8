"""Tensors at chosen addresses: MKL's products have other bits there on some processors, torch's own storages never do."""

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes that torch aligns every storage on the CPU to
PAGE = 4096


def placed(tensor: Tensor, offset: int) -> Tensor:
    """Return a contiguous copy that begins `offset` elements after the start of a page of memory."""
    size = tensor.element_size()
    storage = torch.empty(tensor.numel() + offset + PAGE // size, dtype=tensor.dtype)
    first = -storage.data_ptr() % PAGE // size + offset
    copy = storage[first : first + tensor.numel()].view(tensor.shape)
    copy.copy_(tensor)
    return copy


def misplaced(*tensors: Tensor) -> int:
    return sum(not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT != 0 for tensor in tensors)
