"""Process group of a run: a single process, or several started e.g. by torchrun. Other modules need not distinguish."""

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fluvial.engines.errors import ElsewhereError, FluvialError, LostProcessError, RunError, UsageError, convert_errors
from fluvial.engines.rendezvous import describe_loss, open_store, tell_failure, watch_ranks
from fluvial.models.device import find_default_device, is_accelerator

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
TIMEOUT = 600.0  # default seconds that a collective waits for the other ranks
_entered: ContextVar["World | None"] = ContextVar("world", default=None)


def collective(function: Function) -> Function:
    """Mark a function that all ranks must call, in the same order, and note this in its docstring."""
    function.__dict__["is_collective"] = True
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\nCollective: every rank must call it.\n"
    return function


@dataclass(frozen=True)
class World:
    """Rank of this process, number of ranks, its device, and the mesh of sharded parameters.

    Groups of `sequence` neighbouring ranks work on the same samples (context parallelism). `data_rank` is the index of this
    rank's group, `data_size` the number of groups.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    sequence: int = 1
    group: dist.ProcessGroup | None = None  # process group of the collectives below; None is torch's default group
    timeout: float = TIMEOUT  # seconds that a collective waits for the other ranks

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and the console."""
        return self.rank == 0

    @cached_property
    def data_rank(self) -> int:
        """Index of this rank's group; the ranks of a group share their samples."""
        return self.rank // self.sequence

    @cached_property
    def data_size(self) -> int:
        """Number of groups."""
        return self.size // self.sequence

    def group_ranks(self, sequence: int) -> "World":
        """Return this world with groups of `sequence` ranks; UsageError unless that divides the number of ranks."""
        if self.size % sequence:
            raise UsageError("engine.context_parallel", sequence, f"a divisor of the {self.size} ranks")
        return replace(self, sequence=sequence)

    @collective
    def background(self) -> "World":
        """Return this world with a new CPU group, for collectives on another thread."""
        backend = "fake" if _is_fake() else "gloo"
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout))
        return replace(self, device=torch.device("cpu"), group=group)

    @collective
    def alone(self) -> "World":
        """Return a world of only this process, for modules that are not sharded."""
        if self.size == 1:
            return self
        mesh = self.new_mesh((self.size, 1), ("ranks", "alone"))["alone"]
        return replace(self, rank=0, size=1, sequence=1, mesh=mesh)

    def hybrid_mesh(self, replicas: int) -> DeviceMesh:
        """Return the mesh of hybrid sharding: `replicas` copies, each sharded over an equal part of the ranks."""
        if replicas == 1:
            return self.mesh
        if self.size % replicas:
            raise UsageError("engine.replicas", replicas, f"a divisor of the {self.size} ranks")
        return self.new_mesh((replicas, self.size // replicas), ("replicate", "shard"))

    def new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Return a mesh of all ranks with this world's timeout."""
        return _mesh(self.device, shape, names, self.timeout)

    def peak_memory(self) -> tuple[float, ...]:
        """Return the peak memory of this process, in bytes, without waiting for the device.

        On a GPU, the peaks of memory allocated by tensors and reserved by PyTorch; on the CPU, of the resident set.
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
        """Return the items of all ranks, by rank. An item is any small picklable object."""
        gathered: list[Any] = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, item, group=self.group)
        return gathered

    def gather_data(self, local: Tensor) -> Tensor:
        """Return the equally shaped tensors of all groups, concatenated along the first dimension."""
        return self.gather(local).unflatten(0, (self.size, len(local)))[:: self.sequence].flatten(0, 1)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send each group its rows, and return the rows that this group receives, ordered by sender.

        All ranks of a group exchange the same rows.

        Args:
            rows: `[sum(send), ...]`, ordered by receiver.
            send, receive: number of rows to and from each group.
        """
        offset = self.rank % self.sequence
        counts = [torch.zeros(self.size, dtype=torch.int64) for _ in range(2)]
        for count, groups in zip(counts, (send, receive), strict=True):
            count[offset :: self.sequence] = torch.tensor(groups)
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        sizes = [count.tolist() for count in counts]
        dist.all_to_all_single(
            received, rows.contiguous(), output_split_sizes=sizes[1], input_split_sizes=sizes[0], group=self.group
        )
        return received

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Make every rank fail if one does: the first rank that failed raises its FluvialError, the others ElsewhereError.

        Otherwise the others would wait for the failed rank in their next collective.
        """
        problem: FluvialError | None = None
        try:
            yield
        except FluvialError as error:
            problem = error
        except OSError as error:
            problem = RunError(str(error))
            problem.__cause__ = error
        # A CPU tensor, so gloo gathers it: it detects a lost process and does not wait for the device.
        failed = self.gather(torch.tensor([float(problem is not None)])).nonzero().flatten().tolist()
        if not failed:
            return
        failure = problem
        if failed[0] != self.rank:
            failure = ElsewhereError(f"rank {failed[0]} failed; its own message says why")
        elif not self.is_main:
            failure = RunError(f"rank {self.rank}: {problem}")
        assert failure is not None
        failure.on_all_ranks = True
        if failure is problem:
            raise failure
        raise failure from problem


@contextmanager
def init_world(*, timeout: float = TIMEOUT) -> Iterator[World]:
    """Join the process group of torchrun, or create one of a single process; leave it when the context ends.

    The device is a GPU, if available, with its communication backend (nccl on CUDA), else the CPU with gloo.

    Args:
        timeout: seconds that a collective waits for the other ranks, once all have joined.

    Raises:
        UsageError: torchrun started more processes on this machine than it has GPUs.
        RunError: the processes did not find each other.
        LostProcessError: another process died or timed out.
    """
    device = find_default_device()
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
    with convert_errors(RunError, RuntimeError, says=f"rank {rank}: the {size} processes did not find each other"):
        shared = open_store(rank, size, joining) if size > 1 else None
        store: dist.Store = dist.HashStore() if shared is None else shared
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=joining)
    # PyTorch prefers cuDNN's attention on Hopper. Its backward pass fails in FLUX's blocks (2.11, cuDNN 9.19, an H200) and
    # gives NaN with masks (pytorch/pytorch#196678). `engine.attention=_native_cudnn` still selects it.
    failed, ended, cudnn = True, Event(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if shared is not None:
        Thread(target=watch_ranks, args=(rank, shared.clone(), ended), name="ranks", daemon=True).start()  # type: ignore[attr-defined]
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
            tell_failure(rank, shared)
        if not isinstance(error, RuntimeError) or (reason := describe_loss(error, timeout)) is None:
            raise
        raise LostProcessError(f"rank {rank}: lost another process ({reason})") from error
    finally:
        leave(device, failed=failed and size > 1)
        ended.set()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@contextmanager
def enter_world(world: World) -> Iterator[None]:
    """Make `current_world` return a world until the context ends."""
    token = _entered.set(world)
    try:
        yield
    finally:
        _entered.reset(token)


def current_world() -> World:
    """Return the world of the enclosing `init_world()`; UsageError if there is none."""
    world = _entered.get()
    if world is None:
        raise UsageError("there is no process group: create the engine within `with init_world():`, or pass `world`")
    return world


def leave(device: torch.device, *, failed: bool) -> None:
    """Leave the process group; after a failure, without waiting for the device or the other ranks."""
    if failed and is_accelerator(device):
        # NCCL destroys a communicator on all ranks together, after its collectives: ranks that wait for this one never come.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...], timeout: float) -> DeviceMesh:
    """Return a mesh of all ranks, and set the timeout of its groups and of the default group."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    default_group = dist.group.WORLD
    assert default_group is not None
    for group in () if _is_fake() else (default_group, *mesh.get_all_groups()):
        group.set_timeout(timedelta(seconds=timeout))
    return mesh


def _is_fake() -> bool:
    """Return whether the other ranks are simulated, so that nothing waits for them."""
    return "fake" in dist.get_backend_config()
