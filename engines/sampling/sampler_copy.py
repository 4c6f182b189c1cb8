"""A second copy of the network in this process: it samples with earlier weights while the engine's own is trained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.weights import gather
from fluvial.engines.engine.world import World
from fluvial.models.lora import use_adapter
from fluvial.models.protocol import Weights


def snapshot_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the current weights that training changes, whole and on the host; every rank must take part.

    They are the trained parameters, and those of adapters that follow them.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in {**engine.trainable, **engine.carried}.items():
        found[name] = gather(parameter.detach()).to("cpu", copy=True)
    return found


class Copy:
    """A network that computes as the engine's does, whole in this process, without optimizer.

    Memory per parameter: as `ShardedModule` on one rank, 4 bytes for a trained one and 2 or 4 for a frozen one.

    Args:
        module: network with adapters, built as the engine's was.
        world: process group of the engine. Every rank must take part.
        config: sharding of the engine, of which precision and attention are kept.
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
        compute: Any = "bfloat16" if config.compute_dtype(world.device) == torch.bfloat16 else "float32"
        own = replace(config, replicas=1, context_parallel=1, offload="none", compile=False, compute=compute)
        self.sharded = ShardedModule(module, blocks, self.world, own, weights=weights)
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
