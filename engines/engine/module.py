"""A sharded module for forward passes, and its offload: the base of a training engine, and all that a reference needs."""

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

# Largest bytes of a bucket, which is a copy. The gradients of most adapters fit into one.
BUCKET = 2**28
_held: WeakSet[nn.Module] = WeakSet()  # by a `ShardedModule`


class Copies:
    """Whole copies of a module's parameters, one per rank, with which it computes without FSDP2.

    Where a rank's shard is the whole parameter, FSDP2 would still gather it into a second copy. Here only a parameter of
    another dtype than that of the computation has a cast copy, in place of its values and while the module computes, as
    FSDP2's `MixedPrecisionPolicy` casts it. Gradients add up beside the parameters in the dtype of the reduction. The
    update's last backward pass sums them over the ranks, in flat buckets, and gives them to the parameters.

    Args:
        module: module on its device. Its parameters get storages of their own.
        units: the module and its blocks; each may be called alone.
        compute: dtype of the computation.
        reduce: dtype of the reduction.
        ranks: group of ranks with a copy each; None for a single one.
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
        self._masters: list[Tensor] = []  # values of `_cast` while the module computes
        self._reduced: dict[nn.Parameter, Tensor] = {}  # gradients of earlier backward passes, meanwhile
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
        """Set whether the next backward pass is the update's last, and whether what was cast for another is kept."""
        self._last, self._keep = last, keep

    def unshard(self) -> None:
        """Cast the parameters to the dtype of the computation."""
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
        """Give the parameters their own values back, and free those that were cast."""
        for parameter, master in zip(self._cast, self._masters, strict=False):
            parameter.data = master
        for parameter, gradient in self._reduced.items():
            parameter.grad = gradient
        self._masters.clear()
        self._reduced.clear()
        self._computing = False

    def reset_iter_state(self) -> None:
        """Forget a pass that an exception ended halfway."""
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
        """Sum the gradients over the ranks, and add them to those of the parameters."""
        arrived = [(p, self._gradients.pop(p)) for p in self._trained if p in self._gradients]
        for bucket in buckets([gradient.nbytes for _, gradient in arrived]):
            parameters, gradients = zip(*arrived[bucket], strict=True)
            for parameter, gradient in zip(parameters, self._sum_over_ranks(gradients), strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    parameter.grad.add_(gradient)

    def _sum_over_ranks(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over the ranks, by one collective; they are views of one tensor."""
        if self._ranks is None:
            return gradients
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._ranks)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def buckets(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield which tensors of some bytes go together: in order, as many as have at most `BUCKET` bytes, and at least one."""
    start, held = 0, 0
    for place, size in enumerate(sizes):
        if place > start and held + size > BUCKET:
            yield slice(start, place)
            start, held = place, 0
        held += size
    if sizes:
        yield slice(start, len(sizes))


def largest_bucket(sizes: Sequence[int]) -> int:
    """Return the bytes of the largest bucket of tensors."""
    return max((sum(sizes[bucket]) for bucket in buckets(sizes)), default=0)


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
        if any(part in _held for part in module.modules()):
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
        _held.update(self.units)
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
        """Whether every rank holds all parameters and computes without FSDP2."""
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

        With comm="keep" its parameters are gathered once and kept until the context ends; with `keep`, until `reshard`.
        """
        self.host.check_onloaded()
        with torch.no_grad(), _mode(self.parts, False):
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
        return _mode(self.parts, True)

    def shards(self, *, trainable: bool = False) -> dict[str, Tensor]:
        """Return this rank's shard of each (trainable) parameter by name; it shares the parameter's storage."""
        held = self.module.named_parameters()
        return {name: local(parameter).detach() for name, parameter in held if parameter.requires_grad or not trainable}

    def offload(self) -> None:
        """Move this rank's shards of the parameters, and quantised weights, to the host until `onload`."""
        if self.swap is not None:
            self.swap.reshard()
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
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(first, recurse=False)
                unit.set_reshard_after_backward(first or self._reshard, recurse=False)
            (self._waiting.discard if first else self._waiting.add)(unit)

        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)


def _allocate(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return memory for a tensor without values."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


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
