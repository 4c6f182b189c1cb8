"""A sharded module for forward passes: the base of an engine that trains, and all that a reference or a teacher needs."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fluvial.engines.fsdp.loading import load_weights
from fluvial.engines.fsdp.offload import HostOffload
from fluvial.engines.fsdp.parallelize import EngineConfig, parallelize
from fluvial.engines.fsdp.world import World
from fluvial.models.protocol import Weights


class ShardedModule:
    """A module sharded with FSDP2, without optimizer.

    Memory held a parameter, over the R ranks of one replica: 4 bytes / R for the float32 master of one that is trained, else
    4 or 2 bytes / R in the dtype of the computation; on the CPU with offload="always". Unsharded while it computes, in the
    dtype of the computation: with comm="keep" all parameters, else those of two blocks.

    Args:
        module: on the CPU with its weights, or with parameters on the meta device.
        blocks: the repeated blocks of the module; each is one unit of communication.
        world: of the world.
        config: how the module lies on them.
        weights: the model folder that parameters on the meta device are read from, by each rank its own shards; adapters
            have their values already.

    Raises:
        UsageError: the configuration does not fit the module or the ranks, or the weights do not.
        ValueError: there are parameters on the meta device, and no weights for them.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        world: World,
        config: EngineConfig,
        *,
        weights: Weights | None = None,
    ) -> None:
        empty = any(parameter.is_meta for parameter in module.parameters())
        if empty and weights is None:
            raise ValueError("the module's parameters are on the meta device: name the folder of their weights")
        self.config, self.world = config, world.grouped(config.context_parallel)
        self.module = parallelize(module, blocks, config, self.world)
        self.units = [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]
        self.parking = HostOffload(world.device)
        if empty and weights is not None:
            device = torch.device("cpu") if config.offload == "always" else world.device
            self.module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
            load_weights(self.module, weights, world=world)

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Give the module for forward passes without gradient, in evaluation mode.

        With comm="keep" its parameters are gathered once for all of them.
        """
        self.parking.check_restored()
        with torch.no_grad(), self.eval():
            try:
                yield self.module
            finally:
                for unit in self.units:
                    unit.reshard()

    def train(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in training mode (dropout acts)."""
        return _mode(self.module, True)

    def eval(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in evaluation mode."""
        return _mode(self.module, False)

    def shards(self, *, trainable: bool = False) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters (those that are trained), which share their storage."""
        shards = {}
        for name, parameter in self.module.named_parameters():
            assert isinstance(parameter, DTensor)
            if parameter.requires_grad or not trainable:
                shards[name] = parameter.to_local().detach()
        return shards

    def offload(self) -> None:
        """Move this rank's shards of the parameters to the host; until `onload` nothing can be computed with them."""
        self.parking.park(self.shards().values())

    def onload(self) -> None:
        """Bring the shards back, to the bit."""
        self.parking.restore()


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = {submodule: submodule.training for submodule in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for submodule, mode in before.items():
            submodule.training = mode
