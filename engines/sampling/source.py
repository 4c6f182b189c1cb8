"""Protocol of a source of samples, the one that makes them in this process, and the copy of the network for both.

A copy samples with earlier weights while the engine's own is trained.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import World, collective
from fluvial.engines.gathered import gather
from fluvial.engines.sampling.generate import Chunk, Requests, Sampling, generate
from fluvial.engines.sampling.handshake import Handshake
from fluvial.models import DiffusionModel
from fluvial.models.lora import use_adapter
from fluvial.models.protocol import Weights


@collective
def snapshot_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the current weights that training changes, whole and on the host.

    They are the trained parameters, and those of adapters that follow them.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in {**engine.trainable, **engine.carried}.items():
        weights[name] = gather(parameter.detach()).to("cpu", copy=True)
    return weights


class Copy:
    """A network that computes as the engine's does, whole in this process, without optimizer.

    Memory per parameter: as `ShardedModule` on one rank, 4 bytes for a trained one and 2 or 4 for a frozen one.

    Args:
        module: network with adapters, built as the engine's was.
        world: process group of the engine. Every rank must take part.
        config: settings of the engine; its precision, attention and blocks on the host are taken over.
        adapter: function of the number of updates that returns the adapter that makes rollouts; None is the policy's.
        weights: folder that parameters on the meta device are read from.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        world: World,
        config: EngineConfig,
        *,
        adapter: Callable[[int], str | None],
        weights: Weights | None = None,
    ) -> None:
        self.world = world.alone()
        # Its blocks are not compiled: PyTorch's compiler would be entered from two threads.
        compute: Any = str(config.compute_dtype(world.device)).removeprefix("torch.")
        offload = config.offload if config.swaps_blocks else "none"
        settings = replace(config, replicas=1, context_parallel=1, offload=offload, compile=False, compute=compute)
        self.sharded = ShardedModule(module, blocks, self.world, settings, weights=weights)
        self.module = self.sharded.module
        self.adapter, self.version = adapter, 0
        self._shards = self.sharded.shards()

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over weights as `snapshot_weights` returned them; no other rank takes part."""
        self.version = version
        with torch.no_grad():
            for name, tensor in weights.items():
                self._shards[name].copy_(tensor)
        self.sharded.reshard()

    @contextmanager
    def behaviour(self) -> Iterator[nn.Module]:
        """Yield the network as it makes rollouts, on any thread; no other rank takes part."""
        adapter = self.adapter(self.version)
        with self.sharded.inference() as module, nullcontext() if adapter is None else use_adapter(module, adapter):
            yield module


Holder = Engine | Copy  # of the weights that are pushed
# Opens the network that makes the rollouts, whole or sharded, in evaluation mode.
Behaviour = Callable[[], AbstractContextManager[nn.Module]]


class RolloutSource(Protocol):
    """Makes the samples of rollouts, here or elsewhere, with the weights that it was given last.

    By default there are no weights to push, nothing to compare and nothing to end.
    """

    @collective
    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples in their order, in chunks of `micro_batch`.

        Only the source of this process has collectives here, those of its sharded network.

        Args:
            requests: prompts and ids of this rank's samples, in whole chunks.

        Raises:
            RunError: they cannot be had.
        """
        raise NotImplementedError

    @collective
    def push(self, engine: Holder, version: int) -> None:
        """Make later samples with the current weights.

        Args:
            engine: engine that holds them, or a copy that has been given them; on a copy no other rank takes part.
            version: number of updates that made them.

        Raises:
            RunError: they cannot be given to whatever makes the samples.
        """
        return None

    @collective
    def compare_with_servers(self, requests: Requests, sampling: Sampling) -> Handshake | None:
        """Return how far the source's numbers are from this process's own, None where they are its own or not comparable.

        Args:
            requests: samples of one prompt.
        """
        return None

    @collective
    def probe(self, engine: Holder, requests: Requests, sampling: Sampling) -> Mapping[str, Any]:
        """Return how the modules of the adapter act in each server's answers, by its address; empty where nothing is probed.

        Args:
            engine: what `push` was given last. Its weights are as before at the end, and so are the servers'.
            requests: samples of one prompt.

        Raises:
            RunError: a server does not compute with a module.
        """
        return {}

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
