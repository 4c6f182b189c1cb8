"""Protocol of a source of samples, and the one that makes them in this process."""

from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, generate
from fluvial.engines.sampling.handshake import Handshake
from fluvial.engines.sampling.sampler_copy import Copy
from fluvial.models import DiffusionModel

Holder = Engine | Copy  # of the weights that are pushed
# Opens the network that makes the rollouts, whole or sharded, in evaluation mode.
Behaviour = Callable[[], AbstractContextManager[nn.Module]]


class RolloutSource(Protocol):
    """Makes the samples of rollouts, here or elsewhere, with the weights that it was given last.

    By default there are no weights to push, nothing to compare and nothing to end.
    """

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples in their order, in chunks of `micro_batch`; every rank must take part.

        Only the source of this process has collectives here, those of its sharded network.

        Args:
            requests: prompts and ids of this rank's samples, in whole chunks.

        Raises:
            RunError: they cannot be had.
        """
        raise NotImplementedError

    def push(self, engine: Holder, version: int) -> None:
        """Make later samples with the current weights; every rank must take part.

        Args:
            engine: engine that holds them, or a copy that has been given them; on a copy no other rank takes part.
            version: number of updates that made them.

        Raises:
            RunError: they cannot be given to whatever makes the samples.
        """
        return None

    def compare_with_servers(self, requests: Requests, sampling: Sampling) -> Handshake | None:
        """Return how far the source's numbers are from this process's own, None where they are its own or not comparable.

        Every rank must take part.

        Args:
            requests: samples of one prompt.
        """
        return None

    def leave_out(self, addresses: Collection[str]) -> bool:
        """Ask servers for nothing more, because their samples are of another policy; return whether any server is left."""
        return False

    def hurry(self) -> None:
        """Wait a few seconds at most for servers that do not answer: the run was asked to stop, and they may be, too."""
        return None

    def close(self) -> None:
        """End connections, threads and files."""
        return None


class InProcess(RolloutSource):
    """Source of samples that shares the trainer's weights.

    Args:
        behaviour: opens the network that makes the rollouts.
    """

    def __init__(self, model: DiffusionModel, behaviour: Behaviour) -> None:
        self.model, self.behaviour = model, behaviour
        self._version = 0

    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples, see `RolloutSource`."""
        with self.behaviour() as module:
            for chunk in generate(self.model, module, requests, sampling, micro_batch=micro_batch):
                yield chunk._replace(version=self._version)

    def push(self, engine: Holder, version: int) -> None:
        """Note the version; the weights are shared."""
        self._version = version
