"""The order of pushes and rollouts over the ranks, kept without collectives, which belong to the main thread."""

import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from fluvial.engines.errors import ElsewhereError, LostProcessError
from fluvial.engines.fsdp.world import World

FAILED = "failed"
PAUSE = 0.01  # seconds between two looks at the store


class PushOrder:
    """Lets new weights be pushed once, after every rank has made the rollout before and before any makes the next.

    The ranks' threads see each other through the store of the process group. A look at it blocks nobody; waiting there would
    block the main thread, which has the same connection.

    Args:
        world: process group. Every rank must take part.
        stopped: function that returns whether this rank has given up.
    """

    def __init__(self, world: World, stopped: Callable[[], bool]) -> None:
        self.world, self.stopped, self.last = world, stopped, -1  # number of the last rollout that was made
        self.store: dist.Store | None = None
        if world.size > 1:
            name = world.gather_items(uuid.uuid4().hex)[0]  # a process may train several times
            self.store = dist.PrefixStore(f"fluvial/ahead/{name}", dist.distributed_c10d._get_default_store())

    def push(self, number: int, push: Callable[[], None]) -> None:
        """Push the weights of a rollout, on rank 0 when no rank needs the earlier ones any more, and then on the others.

        Args:
            push: function that pushes them; on the other ranks it has only to note that they were pushed.

        Raises:
            ElsewhereError: another rank failed.
            LostProcessError: another rank did not make its rollout in the time of a collective.
        """
        if self.store is None:
            push()
            return
        if self.world.is_main:
            self._wait([f"made/{self.last}/{rank}" for rank in range(self.world.size)] if self.last >= 0 else [])
            push()
            self.store.set(f"pushed/{number}", "")
        else:
            self._wait([f"pushed/{number}"])
            push()

    def made(self, number: int) -> None:
        """Note that this rank has made a rollout."""
        self.last = number
        if self.store is not None:
            self.store.set(f"made/{number}/{self.world.rank}", "")

    def failed(self) -> None:
        """Tell the other ranks that this one failed."""
        if self.store is not None:
            self.store.set(FAILED, str(self.world.rank))

    def _wait(self, keys: list[str]) -> None:
        assert self.store is not None
        deadline = time.monotonic() + self.world.timeout
        while not all(self.store.check([key]) for key in keys):
            if self.store.check([FAILED]):
                raise ElsewhereError(f"rank {self.store.get(FAILED).decode()} failed; its own message says why")
            if self.stopped():
                raise ElsewhereError("the run has ended")
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"rank {self.world.rank}: another process has not made its rollout within {self.world.timeout:g} s"
                )
            time.sleep(PAUSE)
