"""Tensors that a block keeps for its backward pass, held on the host in between."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fluvial.models.device import is_accelerator


class OnHost(NamedTuple):
    """A tensor that was saved for the backward pass."""

    host: Tensor | None  # None for one of the meta device
    like: tuple[tuple[int, ...], torch.dtype]  # shape and dtype
    device: torch.device


def on_host(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose saved tensors are copied to the host, and back when the backward pass asks for them.

    Around `checkpoint` these are the inputs of a block. Copies of a GPU's tensors are pinned and do not stop the host. On a
    CPU they are copies, too, and save nothing.
    """
    with saved_tensors_hooks(_pack, _unpack):
        return forward(*args, **kwargs)


def _pack(tensor: Tensor) -> OnHost:
    if tensor.is_meta:  # its copies back are new tensors, as on a device
        return OnHost(None, (tuple(tensor.shape), tensor.dtype), tensor.device)
    pinned = is_accelerator(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return OnHost(host.copy_(tensor, non_blocking=pinned), (tuple(tensor.shape), tensor.dtype), tensor.device)


def _unpack(saved: OnHost) -> Tensor:
    if saved.host is not None:
        return saved.host.to(saved.device, non_blocking=True, copy=True)
    shape, dtype = saved.like
    return torch.empty(shape, dtype=dtype, device=saved.device)
