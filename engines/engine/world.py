"""The process group of a run: one process, or as many as were started, e.g. by torchrun. Other modules see no difference.

Also the switch of the process for deterministic algorithms.
"""

import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fluvial.engines.errors import ElsewhereError, FluvialError, LostProcessError, RunError, UsageError
from fluvial.models.device import default_device, is_accelerator

T = TypeVar("T")
_entered: ContextVar["World | None"] = ContextVar("world", default=None)

STORE = "fluvial/store"  # key of rank 0's port in torchrun's store
FAILED = "fluvial/failed"  # key of the rank that failed first
LOOK, GRACE = 2.0, 8.0  # seconds between two looks at that key, and those that a rank has to notice by itself
TIMEOUT = 600.0  # default seconds that a collective waits for the other ranks
# Messages of gloo and nccl when another process is gone or silent. Gloo has no exception class of its own, and other errors
# of its transport, e.g. for tensors of unequal sizes, are faults of the program.
GONE = re.compile(
    r"closed by peer|connection (was (likely )?)?(reset|refused|closed)|broken pipe|remote process exit|network error"
    r"|communicator was aborted",
    re.IGNORECASE,
)
SILENT = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """This process among the others: its rank, the number of ranks, its device, and the mesh for sharded parameters.

    Groups of `sequence` neighbouring ranks work on the same samples (context parallelism). `data_rank` is the index of this
    rank's group, `data_size` the number of groups.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: int = 1
    group: dist.ProcessGroup | None = None  # of the collectives below; None means torch's default group
    timeout: float = TIMEOUT  # seconds that a collective waits for the other ranks

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and the console."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this rank's group; the ranks of a group have the same samples."""
        return self.rank // self.sequence

    @property
    def data_size(self) -> int:
        """Number of groups."""
        return self.size // self.sequence

    def group_ranks(self, sequence: int) -> "World":
        """Return this world with groups of `sequence` ranks; UsageError unless that divides the number of ranks."""
        if self.size % sequence:
            raise UsageError("engine.context_parallel", sequence, f"a divisor of the {self.size} ranks")
        return replace(self, sequence=sequence)

    def background(self) -> "World":
        """Return this world with a new group on the CPU, for collectives of another thread. Every rank must take part."""
        backend = "fake" if _is_fake() else "gloo"
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout))
        return replace(self, device=torch.device("cpu"), group=group)

    def alone(self) -> "World":
        """Return a world of this process alone, for modules that it holds whole. Every rank must take part."""
        if self.size == 1:
            return self
        mesh = self.new_mesh((self.size, 1), ("ranks", "alone"))["alone"]
        return replace(self, rank=0, size=1, sequence=1, mesh=mesh)

    def hybrid_mesh(self, replicas: int) -> DeviceMesh:
        """Return the mesh for a number of replicas, each sharded over its part of the ranks, whose number it divides."""
        if replicas == 1:
            return self.mesh
        if self.size % replicas:
            raise UsageError("engine.replicas", replicas, f"a divisor of the {self.size} ranks")
        return self.new_mesh((replicas, self.size // replicas), ("replicate", "shard"))

    def new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Return a mesh of all ranks with this world's timeout."""
        return _mesh(self.device, shape, names, self.timeout)

    def peak_memory(self) -> tuple[float, ...]:
        """Return the largest bytes of memory that this process has held since it began, without waiting for the device.

        On a GPU these are what tensors took and what PyTorch reserved for them; on the CPU it is the resident set.
        """
        if is_accelerator(self.device):
            module = torch.get_device_module(self.device)
            return module.max_memory_allocated(self.device), module.max_memory_reserved(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return (unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,)

    def gather(self, local: Tensor) -> Tensor:
        """Return the equally shaped tensors of all ranks, concatenated by rank along the first dimension."""
        if self.size == 1:
            return local
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local.contiguous(), group=self.group)
        return torch.cat(gathered)

    def gather_items(self, item: T) -> list[T]:
        """Return the items of all ranks, by rank. An item is any small object that can be pickled."""
        gathered: list[Any] = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, item, group=self.group)
        return gathered

    def gather_data(self, local: Tensor) -> Tensor:
        """Return the equally shaped tensors of all groups, concatenated along the first dimension."""
        return self.gather(local).unflatten(0, (self.size, len(local)))[:: self.sequence].flatten(0, 1)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send each group its rows, and return the rows that this group receives, ordered by sender.

        Within a group each rank does the same.

        Args:
            rows: `[sum(send), ...]`, ordered by receiver.
            send, receive: number of rows to and from each group.
        """
        own = self.rank % self.sequence
        counts = [torch.zeros(self.size, dtype=torch.int64) for _ in range(2)]
        for count, groups in zip(counts, (send, receive), strict=True):
            count[own :: self.sequence] = torch.tensor(groups)
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        sizes = [count.tolist() for count in counts]
        dist.all_to_all_single(
            received, rows.contiguous(), output_split_sizes=sizes[1], input_split_sizes=sizes[0], group=self.group
        )
        return received

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Make every rank fail if one does: the first rank that failed raises its FluvialError, the others ElsewhereError.

        Otherwise the others would wait in their next collective for a rank that is gone.
        """
        problem: FluvialError | None = None
        try:
            yield
        except FluvialError as error:
            problem = error
        except OSError as error:
            problem = RunError(str(error))
            problem.__cause__ = error
        # On the CPU, and so by gloo, which notices a lost process and waits for no device.
        failed = self.gather(torch.tensor([float(problem is not None)])).nonzero().flatten().tolist()
        if not failed:
            return
        told = problem
        if failed[0] != self.rank:
            told = ElsewhereError(f"rank {failed[0]} failed; its own message says why")
        elif not self.is_main:
            told = RunError(f"rank {self.rank}: {problem}")
        assert told is not None
        told.on_all_ranks = True
        if told is problem:
            raise told
        raise told from problem


@contextmanager
def init_world(*, timeout: float = TIMEOUT) -> Iterator[World]:
    """Join the process group that torchrun set up, or make one of a single process; leave it when the context ends.

    The device is a GPU with the library of its kind (nccl on CUDA) if there is one, else the CPU with gloo.

    Args:
        timeout: seconds that a collective waits for the other ranks, once all have joined.

    Raises:
        UsageError: torchrun started more processes on this machine than it has GPUs.
        RunError: the processes did not find each other.
        LostProcessError: another process died, or did not answer in time.
    """
    device = default_device()
    module, local = torch.get_device_module(device), int(os.environ.get("LOCAL_RANK", 0))
    if is_accelerator(device) and local >= module.device_count():
        raise UsageError(
            f"{os.environ.get('LOCAL_WORLD_SIZE')} processes were started on a machine with {module.device_count()} "
            "GPUs: start at most as many, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    backend = "gloo"
    if is_accelerator(device):
        device = torch.device(device.type, local)
        module.set_device(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    # Joining may take longer than a collective, because processes start at different speeds.
    joining = timedelta(seconds=max(timeout, TIMEOUT))
    try:
        shared = _store(rank, size, joining) if size > 1 else None
        store: dist.Store = dist.HashStore() if shared is None else shared
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=joining)
    except RuntimeError as error:
        raise RunError(f"rank {rank}: the {size} processes did not find each other: {error}") from error
    # PyTorch prefers cuDNN's attention on Hopper. Its backward pass fails in FLUX's blocks (2.11, cuDNN 9.19, an H200) and
    # gives NaN with masks (pytorch/pytorch#196678). `engine.attention=_native_cudnn` takes it all the same.
    failed, ended, cudnn = True, Event(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if shared is not None:
        Thread(target=_watch, args=(rank, shared.clone(), ended), name="ranks", daemon=True).start()  # type: ignore[attr-defined]
    try:
        world = World(rank, size, device, _mesh(device, (size,), ("shard",), timeout), timeout=timeout)
        with enter_world(world):
            yield world
        if size > 1:
            dist.barrier()  # no rank closes connections while others still use them
        failed = False
        ended.set()
    except BaseException as error:
        if shared is not None and not getattr(error, "on_all_ranks", False):
            _tell(rank, shared)
        if not isinstance(error, RuntimeError) or (reason := _lost(error, timeout)) is None:
            raise
        raise LostProcessError(f"rank {rank}: lost another process ({reason})") from error
    finally:
        leave(device, failed=failed and size > 1)
        ended.set()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@contextmanager
def enter_world(world: World) -> Iterator[None]:
    """Make a world the one that `current_world` returns, until the context ends."""
    token = _entered.set(world)
    try:
        yield
    finally:
        _entered.reset(token)


def current_world() -> World:
    """Return the world of the enclosing `init_world()`.

    Raises:
        UsageError: there is none.
    """
    world = _entered.get()
    if world is None:
        raise UsageError("there is no process group: create the engine within `with init_world():`, or pass `world`")
    return world


def join_world() -> World:
    """Return the world of a process group that another program has opened, e.g. a worker of verl.

    Its device is the current GPU, or the CPU.

    Raises:
        UsageError: there is no process group.
    """
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    device = default_device()
    if is_accelerator(device):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))


def leave(device: torch.device, *, failed: bool) -> None:
    """Leave the process group; after a failure without waiting for the device or for the other ranks."""
    if failed and is_accelerator(device):
        # NCCL destroys a communicator on all ranks together, after its collectives: ranks that wait for this one never come.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _store(rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
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


def _watch(rank: int, store: dist.TCPStore, ended: Event) -> None:
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


def _tell(rank: int, store: dist.TCPStore) -> None:
    """Tell the other ranks that this one has failed."""
    if _find_failed(store) is None:
        with suppress(dist.DistError):
            store.set(FAILED, str(rank))


def _mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...], timeout: float) -> DeviceMesh:
    """Return a mesh of all ranks, and set the timeout of its groups and of the default group."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    everyone = dist.group.WORLD
    assert everyone is not None
    for group in () if _is_fake() else (everyone, *mesh.get_all_groups()):
        group.set_timeout(timedelta(seconds=timeout))
    return mesh


def _is_fake() -> bool:
    """Return whether the other ranks are simulated: then nobody is waited for."""
    return "fake" in dist.get_backend_config()


def _lost(error: RuntimeError, timeout: float) -> str | None:
    """Return why a collective failed if another process is the cause, else None."""
    text = str(error)
    if not isinstance(error, dist.DistError) and "gloo/transport" not in text:
        return None
    if GONE.search(text):
        return "its connection is closed"
    return f"no answer within {timeout:g} s" if SILENT.search(text) else None


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms only, and raise on operations that have none; restored afterwards.

    The same seed then gives the same bits on the same machine, versions and number of ranks. On CUDA some algorithms are
    slower, cuDNN's benchmark is off, and cuBLAS gets a fixed workspace. CUBLAS_WORKSPACE_CONFIG stays set, because cuBLAS
    reads it once. A CPU with a fixed number of threads needs none of this.
    """
    if not on:
        yield
        return
    memory: Any = torch.utils.deterministic  # has its setting as a property, which type checkers do not see
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        memory.fill_uninitialized_memory = False  # nothing here reads memory that it did not write
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill
