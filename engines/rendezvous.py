"""How the processes of a run find each other, and how each learns that another one has failed."""

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
LOOK, GRACE = 2.0, 8.0  # seconds between two looks at that key, and those that a rank has to notice by itself
# Messages of gloo and nccl when another process is gone or silent. Gloo has no exception class of its own, and other errors
# of its transport, e.g. for tensors of unequal sizes, are faults of the program.
GONE = re.compile(
    r"closed by peer|connection (was (likely )?)?(reset|refused|closed)|broken pipe|remote process exit|network error"
    r"|communicator was aborted",
    re.IGNORECASE,
)
SILENT = re.compile(r"timed? ?out", re.IGNORECASE)


def open_store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Return a new store through which the processes of this attempt find each other.

    Torchrun keeps one store for all attempts, which still holds the addresses of the last attempt's processes
    (pytorch/pytorch#135712). It counts attempts on each machine separately, so a count cannot tell them apart. So rank 0
    opens another store and leaves its port in torchrun's. The port of an earlier attempt does not answer.

    Raises:
        RuntimeError: rank 0 did not appear in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        opened = os.environ.pop(
            "FLUVIAL_STORE_SOCKET", None
        )  # of engines.run.process.launch, on rank 0; it serves one store
        listening = None if opened is None else int(opened)
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
            socket.create_connection((host, port), timeout=5).close()  # quietly: the store would complain
            store = dist.TCPStore(host, port, size, timeout=timedelta(seconds=10), wait_for_workers=False)
        except (OSError, dist.DistError):
            time.sleep(0.1)
        else:
            store.set_timeout(timeout)
            return store
    raise RuntimeError(f"rank 0 has not answered on {host} within {timeout.total_seconds():g} s")


def watch_ranks(rank: int, store: dist.TCPStore, ended: Event) -> None:
    """End this process in one line if another rank has failed and this one does not notice by itself.

    A rank in a collective of NCCL whose peer has raised waits until the timeout, and no Python runs on its main thread.
    """
    while not ended.wait(LOOK):
        failed = _find_failed(store)
        if failed is not None and not ended.wait(GRACE):
            line = f"fluvial: rank {rank}: rank {failed} failed, and this one waited for it; its own message says why\n"
            os.write(2, line.encode())
            os._exit(1)


def _find_failed(store: dist.TCPStore) -> str | None:
    """Return which rank has failed, None if none has said so; rank 0 if its store is gone."""
    try:
        socket.create_connection((store.host, store.port), timeout=5).close()  # quietly: the store would complain
        return store.get(FAILED).decode() if store.check([FAILED]) else None
    except (OSError, dist.DistError):
        return "0"


def tell_failure(rank: int, store: dist.TCPStore) -> None:
    """Tell the other ranks that this one has failed."""
    if _find_failed(store) is None:
        with suppress(dist.DistError):
            store.set(FAILED, str(rank))


def describe_loss(error: RuntimeError, timeout: float) -> str | None:
    """Return why a collective failed if another process is the cause, else None."""
    text = str(error)
    if not isinstance(error, dist.DistError) and "gloo/transport" not in text:
        return None
    if GONE.search(text):
        return "its connection is closed"
    return f"no answer within {timeout:g} s" if SILENT.search(text) else None
