"""Tensors that wait on the host while the device needs their memory."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostOffload:
    """Moves the storages of tensors to the host and back, to the bit; who holds the tensors holds them still.

    Memory: as many bytes on the host, pinned for a GPU; on the device none, because the storages are emptied. On a CPU it is
    the same, and saves nothing.

    Args:
        device: where the tensors are computed with. Those elsewhere (kept on the CPU all along) are left alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # on the device, on the host

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and empty them on the device; those that are parked already stay so."""
        pinned = self.device.type == "cuda"
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.device.type != self.device.type:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            host.copy_(storage)
            self.parked.append((storage, host))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring everything back to the tensors that held it."""
        for storage, host in self.parked:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        if self.parked and self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # before the host's memory is given back
        self.parked.clear()

    def check_restored(self) -> None:
        """Raise ValueError if something waits on the host."""
        if self.parked:
            raise ValueError("tensors of the engine were offloaded to the host: call onload() first")
