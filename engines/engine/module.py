"""A sharded module for forward passes, and its offload: the base of a training engine, and all that a reference needs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.engine.optimizers import local
from fluvial.engines.engine.parallelize import find_blocks, parallelize
from fluvial.engines.engine.weights import load_weights
from fluvial.engines.engine.whole import WholeModule
from fluvial.engines.engine.world import World, current_world
from fluvial.models.device import has_values, is_accelerator
from fluvial.models.protocol import Weights
from fluvial.models.quantised import find_quantised


class HostOffload:
    """Moves the storages of tensors to the host and back, to the bit. The tensors themselves stay the same objects.

    Memory: the host holds as many bytes, pinned for a GPU. The device holds none, because the storages are emptied. On a CPU
    the same happens and saves nothing.

    Args:
        device: device that the tensors are computed on. Tensors on another device are left alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: list[tuple[Tensor, Tensor]] = []  # all of a storage on the device, and its copy on the host

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and empty them on the device. Storages already moved stay so."""
        pinned = is_accelerator(self.device)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or tensor.device.type != self.device.type:
                continue
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
            self._moved.append((whole, host.copy_(whole)))
            storage.resize_(0)

    def onload(self) -> None:
        """Copy every storage back to the device."""
        for whole, host in self._moved:
            whole.untyped_storage().resize_(host.nbytes)
            whole.copy_(host, non_blocking=True)
        if self._moved and is_accelerator(self.device):
            torch.get_device_module(self.device).current_stream().synchronize()  # before the host's memory is freed
        self._moved.clear()

    def check_onloaded(self) -> None:
        """Raise ValueError if any storage is on the host."""
        if self._moved:
            raise ValueError("tensors of the engine are offloaded to the host: call onload() first")


class ShardedModule:
    """A module sharded with FSDP2, or held by each rank as a whole copy, without optimizer.

    Memory per parameter, with R ranks per replica: 4 / R bytes for the float32 master of a trained parameter, and 4 / R or
    2 / R bytes (the compute dtype) for a frozen one; on the CPU with offload="always". While it computes, unsharded
    parameters in the compute dtype: all of them with comm="keep", else those of two blocks; if `is_whole`, only those
    that are held in another dtype.

    Args:
        module: module on the CPU with its weights, or with parameters on the meta device.
        blocks: repeated blocks of the module; each is one unit of communication. By default `find_blocks(module)`.
        world: process group the module is sharded over. By default the one of the enclosing `init_world()`.
        config: sharding, precision, checkpointing and offload.
        weights: model folder that parameters on the meta device are read from, each rank its own shards. Adapters have
            their values already.

    Raises:
        UsageError: the configuration does not fit the module or the ranks, or the weights do not fit the module.
        ValueError: the module is sharded already, or has parameters on the meta device and `weights` is not given.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module] | None = None,
        world: World | None = None,
        config: EngineConfig | None = None,
        *,
        weights: Weights | None = None,
    ) -> None:
        if any(isinstance(unit, FSDPModule) for unit in module.modules()):
            raise ValueError("the module is sharded already: give each engine a module of its own")
        blocks = find_blocks(module) if blocks is None else blocks
        world = world or current_world()
        config = config or EngineConfig()
        empty = any(parameter.is_meta for parameter in module.parameters())
        if empty and weights is None:
            raise ValueError("the module's parameters are on the meta device: give the folder of their weights")
        self.config, self.world = config, world.group_ranks(config.context_parallel)
        self.module = parallelize(module, blocks, config, self.world)
        self.parts = list(self.module.modules())
        self.units = [unit for unit in self.parts if isinstance(unit, FSDPModule)]
        self.host = HostOffload(world.device)
        if empty and weights is not None:
            self.module._apply(self._allocate)
            if has_values(world.device):
                load_weights(self.module, weights, world=world)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all parameters and computes without FSDP2."""
        return isinstance(self.module, WholeModule)

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Return memory for a tensor without values: parameters on the host with offload="always", buffers on the device."""
        on_host = self.config.offload == "always" and isinstance(tensor, nn.Parameter)
        device = torch.device("cpu") if on_host else self.world.device
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    @contextmanager
    def inference(self, *, keep: bool = False) -> Iterator[nn.Module]:
        """Yield the module for forward passes without gradient, in evaluation mode.

        With comm="keep" its parameters are gathered once and kept until the context ends; with `keep`, until `reshard`.
        """
        self.host.check_onloaded()
        with torch.no_grad(), self.eval():
            try:
                yield self.module
            finally:
                if not keep:
                    self.reshard()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self.units:
            unit.reshard()

    def train(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in training mode (dropout is active)."""
        return _mode(self.parts, True)

    def eval(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in evaluation mode."""
        return _mode(self.parts, False)

    def shards(self, *, trainable: bool = False) -> dict[str, Tensor]:
        """Return this rank's shard of each (trainable) parameter by name; it shares the parameter's storage."""
        held = self.module.named_parameters()
        return {name: local(parameter) for name, parameter in held if parameter.requires_grad or not trainable}

    def offload(self) -> None:
        """Move this rank's shards of the parameters, and quantised weights, to the host until `onload`."""
        quantised = (tensor for layer in find_quantised(self.module).values() for tensor in layer.quantised)
        self.host.offload([*self.shards().values(), *quantised])

    def onload(self) -> None:
        """Move the shards back, to the bit."""
        self.host.onload()


class LastBackward:
    """Lets each unit reduce its gradients, and free its parameters, after its last use in the update's last backward pass.

    FSDP reduces a block's gradients and frees its parameters after each use of the block. If two uses share a backward pass,
    as guidance in two passes does, the gradients of earlier micro-batches would be reduced after the first use and the rest
    after the second, and the parameters gathered again in between.

    Args:
        units: units of communication.
        reshard: whether a unit's parameters are freed after each use all the same.
    """

    def __init__(self, units: Sequence[FSDPModule], *, reshard: bool) -> None:
        self._reshard, self._last = reshard, False
        self._forwards: Counter[FSDPModule] = Counter()
        self._waiting: set[FSDPModule] = set()
        for unit in units:
            unit.register_forward_hook(self._forward)  # type: ignore[attr-defined]

    def begin(self, last: bool) -> None:
        """Begin a micro-batch; `last`: whether it is the update's last one."""
        self._last = last
        self._forwards.clear()

    def end(self) -> None:
        """End the update; ValueError if the loss does not need a forward pass, so that gradients were never reduced."""
        self._last = False  # outside of an update FSDP's own rule applies
        if self._waiting:
            self._waiting.clear()
            raise ValueError("update: loss_fn ran a forward pass that the loss does not need: run it under torch.no_grad()")

    def _forward(self, unit: Any, args: tuple, output: Any) -> None:
        # A checkpointed block runs its forward again within the backward pass; that is not a use of its own.
        if not self._last or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._forwards[unit] += 1
        first = self._forwards[unit] == 1  # first in the forward pass is last in the backward pass

        def backward(grad: Tensor) -> None:
            unit.set_requires_gradient_sync(first, recurse=False)
            unit.set_reshard_after_backward(first or self._reshard, recurse=False)
            (self._waiting.discard if first else self._waiting.add)(unit)

        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)


@contextmanager
def _mode(parts: Sequence[nn.Module], training: bool) -> Iterator[None]:
    # Only what differs is written: `train` takes long beside a small network's pass.
    changed = [part for part in parts if part.training != training]
    if all(type(part).train is nn.Module.train for part in changed):
        _write_training(changed, training)
    else:  # one that has a `train` of its own does more than that
        parts[0].train(training)
    try:
        yield
    finally:
        _write_training(changed, not training)


def _write_training(modules: Sequence[nn.Module], training: bool) -> None:
    for module in modules:
        vars(module)["training"] = training  # an assignment would first look for parameters, buffers and modules
