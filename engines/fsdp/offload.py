"""Offload of tensors to the host while the device needs their memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fluvial.models.device import is_accelerator


class HostOffload:
    """Moves the storages of tensors to the host and back, to the bit. The tensors themselves stay the same objects.

    Memory: the host holds as many bytes, pinned for a GPU. The device holds none, because the storages are emptied. On a CPU
    the same happens and saves nothing.

    Args:
        device: device that the tensors are computed on. Tensors on another device are left alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: list[tuple[Tensor, Tensor]] = []  # all of a storage on the device, and its copy on the host

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and empty them on the device. Storages already moved stay so."""
        pinned = is_accelerator(self.device)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or tensor.device.type != self.device.type:
                continue
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
            self._moved.append((whole, host.copy_(whole)))
            storage.resize_(0)

    def onload(self) -> None:
        """Copy every storage back to the device."""
        for whole, host in self._moved:
            whole.untyped_storage().resize_(host.nbytes)
            whole.copy_(host, non_blocking=True)
        if self._moved and is_accelerator(self.device):
            torch.get_device_module(self.device).current_stream().synchronize()  # before the host's memory is freed
        self._moved.clear()

    def check_onloaded(self) -> None:
        """Raise ValueError if any storage is on the host."""
        if self._moved:
            raise ValueError("tensors of the engine are offloaded to the host: call onload() first")
