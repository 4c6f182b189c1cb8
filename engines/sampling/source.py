"""Rollout sources: the protocol, the in-process source, and a copy of the network.

The copy samples with earlier weights while the engine's network is trained.
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
    """Return the current weights that training changes, unsharded and on the host.

    These are the trained parameters, and the adapters that follow them.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in {**engine.trainable, **engine.carried}.items():
        weights[name] = gather(parameter.detach()).to("cpu", copy=True)
    return weights


class Copy:
    """Unsharded copy of the engine's network in this process, without optimizer.

    Memory per parameter, as for `ShardedModule` on one rank: 4 bytes if trained, 2 or 4 if frozen.

    Args:
        module: network with adapters, built like the engine's.
        world: process group of the engine; all ranks must build the copy.
        config: settings of the engine, whose precision, attention and block offload apply.
        adapter: function from a number of updates to the adapter that generates rollouts; None is the policy's.
        weights: folder that parameters on the meta device are loaded from.
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
        # Blocks are not compiled, because torch.compile would be entered from two threads.
        compute: Any = str(config.compute_dtype(world.device)).removeprefix("torch.")
        offload = config.offload if config.swaps_blocks else "none"
        settings = replace(config, replicas=1, context_parallel=1, offload=offload, compile=False, compute=compute)
        self.sharded = ShardedModule(module, blocks, self.world, settings, weights=weights)
        self.module = self.sharded.module
        self.adapter, self.version = adapter, 0
        self._shards = self.sharded.shards()

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load weights from `snapshot_weights`; not collective."""
        self.version = version
        with torch.no_grad():
            for name, tensor in weights.items():
                self._shards[name].copy_(tensor)
        self.sharded.reshard()

    @contextmanager
    def behaviour(self) -> Iterator[nn.Module]:
        """Yield the network that generates rollouts, on any thread; not collective."""
        adapter = self.adapter(self.version)
        with self.sharded.inference() as module, nullcontext() if adapter is None else use_adapter(module, adapter):
            yield module


Holder = Engine | Copy  # has the weights that are pushed
# Opens the network that generates the rollouts, unsharded or sharded, in evaluation mode.
Behaviour = Callable[[], AbstractContextManager[nn.Module]]


class RolloutSource(Protocol):
    """Generates the samples of rollouts, in process or on servers, with the weights that were pushed last.

    The default methods are those of a source without servers.
    """

    @collective
    def generate(self, requests: Requests, sampling: Sampling, *, micro_batch: int) -> Generator[Chunk, None, None]:
        """Yield the requested samples in their order, in chunks of `micro_batch`.

        Only the in-process source runs collectives, those of its sharded network.

        Args:
            requests: prompts and ids of this rank's samples, in full chunks.

        Raises:
            RunError: the samples cannot be generated.
        """
        raise NotImplementedError

    @collective
    def push(self, engine: Holder, version: int) -> None:
        """Use the current weights for later samples.

        Args:
            engine: engine with the weights, or a copy that has loaded them; with a copy this is not collective.
            version: number of updates of these weights.

        Raises:
            RunError: the servers cannot be given the weights.
        """
        return None

    @collective
    def compare_with_servers(self, requests: Requests, sampling: Sampling) -> Handshake | None:
        """Compare the source's log-probs with this process's; None for an in-process source, or if they cannot be compared.

        Args:
            requests: samples of one prompt.
        """
        return None

    @collective
    def probe(self, engine: Holder, requests: Requests, sampling: Sampling) -> Mapping[str, Any]:
        """Return how each server's samples react to the adapter's modules, by its address; empty if there is no probe.

        Args:
            engine: engine of the last `push`. Its weights and the servers' are restored at the end.
            requests: samples of one prompt.

        Raises:
            RunError: a server ignores a module of the adapter.
        """
        return {}

    def leave_out(self, addresses: Collection[str]) -> bool:
        """Drop servers whose samples come from another policy; return whether any server is left."""
        return False

    def hurry(self) -> None:
        """Wait at most a few seconds for silent servers, because the run is stopping and they may be, too."""
        return None

    def close(self) -> None:
        """Close connections, threads and files."""
        return None


class InProcess(RolloutSource):
    """Source that samples in this process with the trainer's weights.

    Args:
        behaviour: opens the network that generates the rollouts.
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
        """Store the version; the weights are shared."""
        self._version = version
