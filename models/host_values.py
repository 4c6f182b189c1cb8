"""Host copies of small device tensors, so that reading their values does not wait for the device.

The host knows the values of a tensor that was copied to the device (`to_device`) or computed from known tensors
(`compute_known`), until the tensor is written to.

Copies with one memory layout (`fresh_copy`) keep the bits of a rollout in its update: the bits of a matrix product can
depend on its operands' addresses. tests/README.md says what is promised of bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import optree
import torch
from optree import PyTree
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fluvial.core import types

MOST = 1 << 14  # largest number of elements of a known tensor


class _Kept(NamedTuple):
    host: Tensor
    versions: tuple[int, int]  # versions of the device tensor and of `host` when their values were equal


_kept = WeakTensorKeyDictionary()


def remember(tensor: Tensor, host: Tensor) -> Tensor:
    """Record that `tensor` has the values of `host`, a tensor of the same shape on the CPU, and return `tensor`."""
    versioned = not (tensor.is_inference() or host.is_inference())
    if not _on_host(tensor) and host.numel() <= MOST and versioned:
        _kept[tensor] = _Kept(host, (tensor._version, host._version))
    return tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, as `core.types.to_device`; the host knows the values of a small copy."""
    moved = types.to_device(tensor, device)
    return remember(moved, tensor.detach()) if _on_host(tensor) else moved


def recall(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the CPU, without waiting for its device; None if they are not known."""
    if _on_host(tensor):
        return tensor
    kept: _Kept | None = _kept.get(tensor)
    return kept.host if kept is not None and kept.versions == (tensor._version, kept.host._version) else None


def read(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the CPU; unknown values are read from the device and then known."""
    on_host = recall(tensor)
    if on_host is None:
        on_host = tensor.cpu()
        remember(tensor, on_host)
    return on_host


def compute_known(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return function(*tensors), known if all of the tensors are.

    On an accelerator the function is called twice, for device and host; it must only move, join or repeat values.
    """
    out = function(*tensors)
    if _on_host(out) or out.numel() > MOST:
        return out
    hosts = [host for tensor in tensors if (host := recall(tensor)) is not None]
    return remember(out, function(*hosts)) if len(hosts) == len(tensors) else out


def select_rows(tensor: Tensor, index: Tensor | slice) -> Tensor:
    """Return tensor[index], known if both are."""
    if isinstance(index, slice):
        return compute_known(lambda values: values[index], tensor)
    return compute_known(lambda values, select_rows: values[select_rows], tensor, index)


def join(*tensors: Tensor) -> Tensor:
    """Return torch.cat(tensors), known if all are."""
    return compute_known(lambda *values: torch.cat(values), *tensors)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def fresh_copy(tensors: PyTree[Tensor], device: torch.device) -> PyTree[Tensor]:
    """Copy tensors to a device, contiguous, each at the start of its own storage, which torch aligns to 64 bytes."""

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.device.type != device.type:
            return to_device(tensor.contiguous(), device)
        copy = tensor.to(device, non_blocking=True, copy=True, memory_format=torch.contiguous_format)
        host = recall(tensor)
        return copy if host is None else remember(copy, host)

    return optree.tree_map(copy_tensor, tensors)
