"""A group of a trainer and its servers in which weights are broadcast, by gloo: raw bytes, no pickles, no files."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fluvial.engines.errors import RunError, convert_errors

TIMEOUT = 60.0  # seconds that joining, or one broadcast, may take


def open_store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    """Return the store that the ranks of a group meet at; port 0 takes a free one. RunError if it cannot be reached."""
    with convert_errors(RunError, RuntimeError, OSError, says=f"the group's store at {address}:{port} cannot be reached"):
        wait = timedelta(seconds=TIMEOUT)
        return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=wait)


def own_address(host: str, port: int) -> str:
    """Return the address of this machine that another one reaches it at; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as udp:
        udp.connect(target)
        return str(udp.getsockname()[0])


class BroadcastGroup:
    """One rank of a group; rank 0 sends. It is made once all ranks have come.

    Args:
        store: see `open_store`.
        address: own address, at which the others connect.
        rank, size: number of this rank, and of all of them.
        name: name of the group within its store.

    Raises:
        RunError: a rank does not come.
    """

    def __init__(self, store: dist.TCPStore, address: str, *, rank: int, size: int, name: str) -> None:
        self.name, self.store = name, store
        gloo: Any = dist.ProcessGroupGloo  # torch's types know neither its options nor its operations
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=TIMEOUT)
        with convert_errors(RunError, RuntimeError, says=f"group {name} cannot be joined"):
            self._group = gloo(dist.PrefixStore(name, store), rank, size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send a tensor of the host to all ranks, or receive it in place; RunError if a rank is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with convert_errors(RunError, RuntimeError, says=f"group {self.name} has lost a rank"):
            self._group.broadcast([flat], options).wait()
