"""Sharded modules for forward passes, with offload: the base of training engines and of reference models."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fluvial.engines.engine.config import DTYPES, EngineConfig
from fluvial.engines.engine.parallelize import find_blocks, on_host_tensors, parallelize, swapped_blocks
from fluvial.engines.engine.shards import load_weights, local
from fluvial.engines.engine.world import World, current_world
from fluvial.engines.offload import BlockSwap, HostOffload
from fluvial.models.device import has_values
from fluvial.models.protocol import Weights
from fluvial.models.quantised import find_quantised

# Largest size of a gradient bucket, in bytes. The gradients of most adapters fit into one.
BUCKET = 2**28
_sharded_units: WeakSet[nn.Module] = WeakSet()  # units of all `ShardedModule`s


class Copies:
    """Full copies of a module's parameters, one per rank, which compute without FSDP2.

    If a rank's shard is the full parameter, FSDP2 would still gather it into a second copy. This class copies only
    parameters that are not in the compute dtype: while the module computes, a cast copy replaces their values, as with
    FSDP2's `MixedPrecisionPolicy`. Gradients accumulate outside the parameters, in the reduction dtype. The update's last
    backward pass sums them over the ranks, in flat buckets, and adds them to the parameters' gradients.

    Args:
        module: module on its device. Its parameters get new storages.
        units: the module and its blocks; each may be called separately.
        compute: compute dtype.
        reduce: reduction dtype.
        ranks: process group of the ranks with a copy; None for a single rank.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        *,
        compute: torch.dtype,
        reduce: torch.dtype,
        ranks: dist.ProcessGroup | None,
    ) -> None:
        self._compute, self._reduce_dtype, self._ranks = compute, reduce, ranks
        self._last, self._keep = True, False
        self._computing = self._queued = False
        self._masters: list[Tensor] = []  # values of `_cast`, while the module computes
        self._reduced: dict[nn.Parameter, Tensor] = {}  # gradients of earlier backward passes, while it computes
        self._gradients: dict[nn.Parameter, Tensor] = {}  # not yet reduced
        parameters = list(module.parameters())
        self._cast = [p for p in parameters if p.is_floating_point() and p.dtype != compute]
        self._trained = [p for p in parameters if p.requires_grad]
        for parameter in parameters:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._accumulate)
        for unit in units:
            unit.register_forward_pre_hook(lambda *_: self.unshard(), prepend=True)
        module.register_state_dict_pre_hook(lambda *_: self.reshard())

    def set_last(self, last: bool, *, keep: bool) -> None:
        """Set whether the next backward pass is the update's last, and whether cast parameters stay for another pass."""
        self._last, self._keep = last, keep

    def unshard(self) -> None:
        """Cast the parameters to the compute dtype."""
        if self._computing:
            return
        self._computing = True
        for parameter in self._trained:
            if parameter.grad is not None:
                self._reduced[parameter], parameter.grad = parameter.grad, None
        for parameter in self._cast:
            self._masters.append(parameter.data)
            parameter.data = parameter.data.to(self._compute)

    def reshard(self) -> None:
        """Restore the values of the parameters, and free the cast copies."""
        for parameter, master in zip(self._cast, self._masters, strict=False):
            parameter.data = master
        for parameter, gradient in self._reduced.items():
            parameter.grad = gradient
        self._masters.clear()
        self._reduced.clear()
        self._computing = False

    def reset_iter_state(self) -> None:
        """Discard the state of a pass that an exception interrupted."""
        for parameter in self._trained if self._computing else ():
            parameter.grad = None
        self._queued = False
        self._gradients.clear()
        self.reshard()

    def _accumulate(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.to(self._reduce_dtype), None
        if parameter in self._gradients:
            self._gradients[parameter] += gradient
        else:
            self._gradients[parameter] = gradient
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._queued = False
        if not self._keep:
            self.reshard()
        if self._last:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum the gradients over the ranks, and add them to the parameters' gradients."""
        arrived = [(p, self._gradients.pop(p)) for p in self._trained if p in self._gradients]
        for bucket in buckets([gradient.nbytes for _, gradient in arrived]):
            parameters, gradients = zip(*arrived[bucket], strict=True)
            for parameter, gradient in zip(parameters, self._sum_over_ranks(gradients), strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    parameter.grad.add_(gradient)

    def _sum_over_ranks(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over the ranks, from one collective; they are views of one tensor."""
        if self._ranks is None:
            return gradients
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._ranks)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def buckets(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive tensors, given their bytes: at most `BUCKET` bytes together, or one larger tensor."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > BUCKET:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def largest_bucket(sizes: Sequence[int]) -> int:
    """Return the bytes of the largest bucket of tensors, given their bytes."""
    return max((sum(sizes[bucket]) for bucket in buckets(sizes)), default=0)


class ShardedModule:
    """A module without optimizer, sharded with FSDP2 or copied in full to each rank.

    Memory per parameter, with R ranks per replica: 4 / R bytes for the float32 master of a trained parameter, and 4 / R or
    2 / R bytes (the compute dtype) for a frozen one; on the CPU with offload="always". During computation, also unsharded
    parameters in the compute dtype: all of them with comm="keep", else those of two blocks; if `is_whole`, only those
    that are stored in another dtype.

    Args:
        module: module on the CPU with its weights, or with parameters on the meta device.
        blocks: repeated blocks of the module; each is one unit of communication. By default `find_blocks(module)`.
        world: process group the module is sharded over. By default the one of the enclosing `init_world()`.
        config: sharding, precision, checkpointing and offload.
        weights: model folder from which each rank reads its shards of parameters on the meta device. Adapters must have
            values.

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
        if any(part in _sharded_units for part in module.modules()):
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
        self.units = [part for part in self.parts if part is module or part in {*blocks}]
        self.host = HostOffload(world.device)
        if empty:
            stay = on_host_tensors(module, blocks, config)
            self.module._apply(lambda tensor: _allocate(tensor, "cpu" if id(tensor) in stay else world.device))
        # None if FSDP2 shards the module.
        self.copies = None if isinstance(self.module, FSDPModule) else self._keep_copies()
        self.last_backward = LastBackward(self.units, reshard=config.comm == "reshard")
        _sharded_units.update(self.units)
        if empty and weights is not None and has_values(world.device):
            load_weights(self.module, weights, world=world)
        swapped = swapped_blocks(module, blocks, config)
        self.swap = BlockSwap(swapped, world.device) if swapped else None

    def _keep_copies(self) -> Copies:
        compute, reduce = self.config.compute_dtype(self.world.device), DTYPES[self.config.reduce]
        ranks = dist.group.WORLD if self.world.size > 1 else None
        return Copies(self.module, self.units, compute=compute, reduce=reduce, ranks=ranks)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all parameters and computes without FSDP2."""
        return self.copies is not None

    def set_last(self, last: bool) -> None:
        """Set whether the next backward pass is the last one, which reduces gradients and frees parameters."""
        keep = self.config.comm == "keep" and not last
        if self.copies is not None:
            self.copies.set_last(last, keep=keep)
            return
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last or self.config.grad_sync == "every")
        self.module.set_is_last_backward(last)
        self.module.set_reshard_after_backward(not keep)

    @contextmanager
    def inference(self, *, keep: bool = False) -> Iterator[nn.Module]:
        """Yield the module for forward passes without gradient, in evaluation mode.

        With comm="keep" its parameters are gathered once, and stay until the context ends; with `keep`, until `reshard`.
        """
        self.host.check_onloaded()
        with torch.no_grad(), _set_mode(self.parts, False):
            try:
                yield self.module
            finally:
                if not keep:
                    self.reshard()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        holders: Sequence[Any] = self.units if self.copies is None else [self.copies]
        for holder in [*holders, *([] if self.swap is None else [self.swap])]:
            holder.reshard()

    def train(self) -> AbstractContextManager[None]:
        """Return a context in which the module is in training mode (dropout is active)."""
        return _set_mode(self.parts, True)

    def shards(self, *, trainable: bool = False) -> dict[str, Tensor]:
        """Return this rank's shard of each (trainable) parameter by name; it shares the parameter's storage."""
        named = self.module.named_parameters()
        return {name: local(parameter).detach() for name, parameter in named if parameter.requires_grad or not trainable}

    def offload(self) -> None:
        """Move this rank's shards of the parameters, and quantised weights, to the host until `onload`."""
        if self.swap is not None:
            self.swap.reshard()
        quantised = (tensor for layer in find_quantised(self.module).values() for tensor in layer.quantised)
        self.host.offload([*self.shards().values(), *quantised])

    def onload(self) -> None:
        """Move the shards back to the device, bit-identical."""
        self.host.onload()


class LastBackward:
    """Makes each unit reduce gradients and free parameters after its last use in the update's last backward pass.

    FSDP reduces a block's gradients and frees its parameters after each use of the block. If a backward pass uses a block
    twice, as with guidance in two passes, the gradients of earlier micro-batches would be reduced after the first use and
    the others after the second, and the parameters would be gathered again in between.

    Args:
        units: units of communication.
        reshard: whether to free a unit's parameters after each use nevertheless.
    """

    def __init__(self, units: Sequence[nn.Module], *, reshard: bool) -> None:
        self._reshard, self._last = reshard, False
        self._forwards: Counter[nn.Module] = Counter()
        self._waiting: set[nn.Module] = set()
        for unit in units:
            unit.register_forward_hook(self._forward)

    def begin(self, last: bool) -> None:
        """Begin a micro-batch; `last`: whether it is the update's last one."""
        self._last = last
        self._forwards.clear()

    def end(self) -> None:
        """End the update; ValueError if the loss does not need a forward pass, so that gradients were never reduced."""
        self._last = False  # outside of an update, FSDP's own rule applies
        if self._waiting:
            self._waiting.clear()
            raise ValueError("update: loss_fn ran a forward pass that the loss does not need: run it under torch.no_grad()")

    def _forward(self, unit: Any, args: tuple, output: Any) -> None:
        # A checkpointed block runs its forward again within the backward pass; that is not another use.
        if not self._last or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._forwards[unit] += 1
        first = self._forwards[unit] == 1  # first in the forward pass is last in the backward pass

        def backward(grad: Tensor) -> None:
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(first, recurse=False)
                unit.set_reshard_after_backward(first or self._reshard, recurse=False)
            (self._waiting.discard if first else self._waiting.add)(unit)

        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)


def _allocate(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Allocate memory for a meta tensor; other tensors are returned unchanged."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


@contextmanager
def _set_mode(parts: Sequence[nn.Module], training: bool) -> Iterator[None]:
    # Write only what changes: `train` is slow compared with a small network's pass.
    changed = [part for part in parts if part.training != training]
    if all(type(part).train is nn.Module.train for part in changed):
        _write_training(changed, training)
    else:  # a custom `train` may do more
        parts[0].train(training)
    try:
        yield
    finally:
        _write_training(changed, not training)


def _write_training(modules: Sequence[nn.Module], training: bool) -> None:
    for module in modules:
        vars(module)["training"] = training  # an assignment would first search parameters, buffers and modules
