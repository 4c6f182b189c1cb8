"""Counts page faults of a thread that takes and frees tensors, for test_heap.py."""

import resource
import threading
from itertools import pairwise

import torch

from fluvial.engines.run.process.heap import keep_freed_memory

# The heap grows over the first batches, because tensors are aligned; how many depends on what it held before.
ROUNDS, COUNTED, BYTES = 40, 8, 48_000_000


def faults(keeps: bool) -> int:
    """Return the page faults of the last batches, in which a thread takes tensors of 48 MB and frees them."""
    if keeps:
        keep_freed_memory()
    counts = list[int]()

    def batches() -> None:
        for _ in range(ROUNDS):
            tensors = [torch.ones(BYTES // 4) for _ in range(2)]
            del tensors
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    thread = threading.Thread(target=batches)
    thread.start()
    thread.join()
    return counts[-1] - counts[-1 - COUNTED]


def backward_faults(keeps: bool) -> int:
    """Return the fewest page faults of one of 16 backward passes of a network with 42 MB per activation.

    That is more than glibc keeps. A heap that is kept still grows in some passes, by one activation or two.
    """
    if keeps:
        keep_freed_memory()
    torch.set_num_threads(1)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64))
    x, counts = torch.ones(163_840, 64), list[int]()
    for _ in range(16):
        module(x).sum().backward()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return min(after - before for before, after in pairwise(counts))
