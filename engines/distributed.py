"""The processes of a run: one, or as many as torchrun started. The code above sees no difference."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fluvial.engines.errors import ElsewhereError, FluvialError, RunError, UsageError


@dataclass(frozen=True)
class World:
    """This process among the others: its rank, their number, its device, and the mesh that parameters are sharded on."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and talks to the person."""
        return self.rank == 0

    def hybrid_mesh(self, replicas: int) -> DeviceMesh:
        """Return the mesh of a number of copies of what is sharded, each on its share of the ranks.

        Raises:
            UsageError: the ranks are no multiple of the replicas.
        """
        if replicas == 1:
            return self.mesh
        if self.size % replicas:
            raise UsageError(f"engine: replicas is {replicas}, expected a divisor of the {self.size} ranks")
        return init_device_mesh(self.device.type, (replicas, self.size // replicas), mesh_dim_names=("replicate", "shard"))

    def gather(self, local: Tensor) -> Tensor:
        """Return the ranks' equally shaped tensors, concatenated by rank along the first dimension, on every rank."""
        if self.size == 1:
            return local
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local.contiguous())
        return torch.cat(gathered)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let every rank fail if one does: the first to fail raises its FluvialError, the others ElsewhereError.

        Without this the others would wait in their next collective for a rank that gave up.
        """
        problem: FluvialError | None = None
        try:
            yield
        except FluvialError as error:
            problem = error
        except OSError as error:
            problem = RunError(str(error))
            problem.__cause__ = error
        failed = self.gather(torch.tensor([float(problem is not None)], device=self.device)).nonzero().flatten().tolist()
        if failed and failed[0] != self.rank:
            raise ElsewhereError(f"rank {failed[0]} gave up; its own message says why") from problem
        if problem is not None:
            raise problem if self.is_main else RunError(f"rank {self.rank}: {problem}") from problem


@contextmanager
def world() -> Iterator[World]:
    """Join the process group that torchrun set up, or make one of a single process; leave it at the end.

    Devices are CUDA with nccl where there is a GPU, else the CPU with gloo.

    Raises:
        UsageError: torchrun started more processes on this machine than it has GPUs.
    """
    cuda = torch.cuda.is_available()
    if cuda and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count():
        raise UsageError(
            f"{os.environ.get('LOCAL_WORLD_SIZE')} processes were started on a machine with {torch.cuda.device_count()} "
            "GPUs: start at most as many, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if size > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)))
        if size > 1:
            dist.barrier()  # no rank takes the others' connections away while they still talk
    finally:
        dist.destroy_process_group()
