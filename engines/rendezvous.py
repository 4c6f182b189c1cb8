"""Rendezvous of a run's processes, and notification of their failures."""

import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event

import torch.distributed as dist

STORE = "fluvial/store"  # key of rank 0's port in torchrun's store
FAILED = "fluvial/failed"  # key of the rank that failed first
POLL, GRACE = 2.0, 8.0  # polling interval of that key, and time for a rank to notice the failure by itself, in seconds
# Messages of gloo and nccl when another process is gone or silent. gloo has no specific exception class, and other errors of
# its transport, e.g. for tensors of unequal sizes, are errors of the program.
GONE = re.compile(
    r"closed by peer|connection (was (likely )?)?(reset|refused|closed)|broken pipe|remote process exit|network error"
    r"|communicator was aborted",
    re.IGNORECASE,
)
SILENT = re.compile(r"timed? ?out", re.IGNORECASE)


def open_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Open a new store for the rendezvous of this attempt's processes.

    torchrun keeps one store for all attempts, which still has the addresses of the last attempt's processes
    (pytorch/pytorch#135712). It counts attempts on each machine separately, so counts do not distinguish them. Therefore
    rank 0 opens another store and writes its port to torchrun's. The port of an earlier attempt does not answer.

    Raises:
        RuntimeError: rank 0 did not answer in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # Set by engines.run.process.launch on rank 0; the socket serves one store.
        descriptor = os.environ.pop("FLUVIAL_STORE_SOCKET", None)
        listening = None if descriptor is None else int(descriptor)
        return dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening)
    shared = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        shared.set(STORE, str(store.port))
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        port = int(shared.get(STORE))
        try:
            socket.create_connection((host, port), timeout=5).close()  # tried first, because the store logs failures
            store = dist.TCPStore(host, port, size, timeout=timedelta(seconds=10), wait_for_workers=False)
        except (OSError, dist.DistError):
            time.sleep(0.1)
        else:
            store.set_timeout(timeout)
            return store
    raise RuntimeError(f"rank 0 has not answered on {host} within {timeout.total_seconds():g} s")


def watch_ranks(rank: int, store: dist.TCPStore, ended: Event) -> None:
    """End this process with one line if another rank has failed and this one does not notice by itself.

    In a NCCL collective whose peer has raised, a rank waits until the timeout, and no Python runs on its main thread.
    """
    while not ended.wait(POLL):
        failed = _find_failed(store)
        if failed is not None and not ended.wait(GRACE):
            line = f"fluvial: rank {rank}: rank {failed} failed, and this one waited for it; its own message says why\n"
            os.write(2, line.encode())
            os._exit(1)


def _find_failed(store: dist.TCPStore) -> str | None:
    """Return the rank that has reported a failure, or None; rank 0 if its store does not answer."""
    try:
        socket.create_connection((store.host, store.port), timeout=5).close()  # tried first, because the store logs failures
        return store.get(FAILED).decode() if store.check([FAILED]) else None
    except (OSError, dist.DistError):
        return "0"


def tell_failure(rank: int, store: dist.TCPStore) -> None:
    """Tell the other ranks that this one has failed."""
    if _find_failed(store) is None:
        with suppress(dist.DistError):
            store.set(FAILED, str(rank))


def describe_loss(error: RuntimeError, timeout: float) -> str | None:
    """Describe the failure of a collective if another process is the cause, else None."""
    text = str(error)
    if not isinstance(error, dist.DistError) and "gloo/transport" not in text:
        return None
    if GONE.search(text):
        return "its connection is closed"
    return f"no answer within {timeout:g} s" if SILENT.search(text) else None
