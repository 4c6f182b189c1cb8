"""Whole copies: parameters that are sharded in name only, without the copies, hooks and streams of FSDP2.

Where a rank's shard is the whole parameter, FSDP2 would still gather it into a second copy. Here the module computes with
plain parameters that share the shards' storage, and holds the shards themselves whenever FSDP2 would. Only a parameter of
another dtype than that of the computation is copied, as FSDP2's `MixedPrecisionPolicy` casts it. If several ranks hold a
copy each, gradients are summed over them once per update, in flat buckets.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fluvial.engines.engine.optimizers import shard_like

# Largest bytes of a bucket, which is a copy. The gradients of most adapters fit into one.
BUCKET = 2**28
Slot = tuple[nn.Module, str]  # a module, and the name of a parameter that is registered there


class Parameters:
    """The parameters of a module, registered either as shards or as plain parameters of the computation's dtype.

    Gradients add up beside the plain parameters in the dtype of the reduction. The update's last backward pass sums them
    over the ranks and hands them to the shards.

    Args:
        module: module whose parameters become shards.
        mesh: mesh whose last dimension has one rank; a dimension before it holds the copies.
        policy: dtypes of the computation and of the reduction.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.reshard_after_backward = True
        self.is_last_backward = True
        self._policy = policy
        self._group = mesh.get_group(0) if mesh.ndim > 1 and mesh.size() > 1 else None
        self._queued = False
        self._shards: dict[Slot, nn.Parameter] = {}  # while plain parameters are registered
        self._plain: dict[nn.Parameter, nn.Parameter] = {}  # of each shard
        self._gradients: dict[nn.Parameter, Tensor] = {}  # sum of each plain parameter
        self._slots = [(owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
        made: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two modules share stays shared
        for owner, name in self._slots:
            parameter = owner._parameters[name]
            assert parameter is not None
            if parameter not in made:
                made[parameter] = _shard(parameter, mesh)
            owner._parameters[name] = made[parameter]

    def unshard(self) -> None:
        """Register the plain parameters."""
        if self._shards:
            return
        self._shards = {(owner, name): cast(nn.Parameter, owner._parameters[name]) for owner, name in self._slots}
        plain = {shard: self._plain_of(shard) for shard in dict.fromkeys(self._shards.values())}
        for (owner, name), shard in self._shards.items():
            owner._parameters[name] = plain[shard]

    def reshard(self) -> None:
        """Register the shards, and free the parameters that were cast."""
        for (owner, name), shard in self._shards.items():
            owner._parameters[name] = shard
        for shard, plain in self._plain.items():
            if self._shards and shard.dtype != plain.dtype:
                plain.untyped_storage().resize_(0)
        self._shards.clear()

    def reset(self) -> None:
        """Register the shards, and forget the backward pass that an exception ended halfway."""
        self._queued = False
        self._gradients.clear()
        for plain in self._plain.values():
            plain.grad = None
        self.reshard()

    def _plain_of(self, shard: nn.Parameter) -> nn.Parameter:
        """Return the plain parameter of a shard, with its values."""
        assert isinstance(shard, DTensor)
        local, plain = shard._local_tensor, self._plain.get(shard)
        if plain is None:
            plain = nn.Parameter(local.detach().to(self._policy.param_dtype), requires_grad=shard.requires_grad)
            if plain.requires_grad:
                plain.register_post_accumulate_grad_hook(self._accumulate)
            self._plain[shard] = plain
        elif local.dtype == plain.dtype:
            if plain.untyped_storage()._cdata != local.untyped_storage()._cdata:  # the shard has moved
                plain.data = local.detach()
        else:
            plain.untyped_storage().resize_(local.numel() * plain.itemsize)
            with torch.no_grad():
                plain.copy_(local)
        return plain

    def _accumulate(self, plain: Any) -> None:
        if plain.dtype != self._policy.reduce_dtype:  # else autograd adds them up itself
            gradient, plain.grad = plain.grad, None
            if plain in self._gradients:
                self._gradients[plain] += gradient
            else:
                self._gradients[plain] = gradient.to(self._policy.reduce_dtype)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._queued = False
        if self.is_last_backward:
            with torch.no_grad():
                self._reduce()
        if self.reshard_after_backward:
            self.reshard()

    def _reduce(self) -> None:
        """Sum the gradients over the ranks, and add them to those that the shards hold."""
        found = list[tuple[nn.Parameter, Tensor]]()
        for shard, plain in self._plain.items():
            gradient = self._gradients.pop(plain, plain.grad)
            if gradient is not None:
                found.append((shard, gradient))
                plain.grad = None
        for bucket in buckets([gradient.nbytes for _, gradient in found]):
            gradients = [gradient for _, gradient in found[bucket]]
            if self._group is not None:
                gradients = _sum_over_ranks(gradients, self._group)
            for (shard, _), gradient in zip(found[bucket], gradients, strict=True):
                if isinstance(shard.grad, DTensor):
                    shard.grad._local_tensor.add_(gradient)
                else:
                    shard.grad = shard_like(shard, gradient.to(shard.dtype))


class WholeModule(FSDPModule):
    """A unit of a module whose copy on each rank is whole, with the interface of FSDP2. Units share their `Parameters`."""

    _orig_cls_mro_index = 3
    _whole: Parameters

    def reshard(self) -> None:
        """Register the shards of all units."""
        self._whole.reshard()

    def unshard(self, async_op: bool = False) -> None:
        """Register plain parameters in all units."""
        self._whole.unshard()

    def reset_iter_state(self) -> None:
        """Register the shards after a pass that an exception ended halfway."""
        self._whole.reset()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Do nothing: gradients are reduced once per update, because reducing them earlier would save no memory."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward pass is the update's last, which reduces gradients."""
        self._whole.is_last_backward = is_last_backward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the shards are registered after each backward pass; for all units, so only with `recurse`."""
        if recurse:
            self._whole.reshard_after_backward = reshard_after_backward

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


def keep_whole(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Make the blocks and the module, of the same values on every rank, units as `fully_shard` does, with whole copies.

    `mesh` and `policy` are those of `Parameters`.
    """
    parameters = Parameters(module, mesh, policy)
    for unit in dict.fromkeys([*blocks, module]):
        unit.__class__ = _whole_class(cast(Hashable, type(unit)))
        object.__setattr__(unit, "_whole", parameters)
        unit.register_forward_pre_hook(_unshard, prepend=True)
    module.register_state_dict_pre_hook(_reshard)


@cache
def _whole_class(kind: Any) -> type:
    """Return the class of units of a kind; blocks that are alike share it, and so one compiled graph."""
    return type(f"FSDP{kind.__name__}", (WholeModule, kind), {})


def _unshard(unit: Any, args: tuple) -> None:
    unit.unshard()


def _reshard(module: Any, *_: Any) -> None:
    module.reshard()


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter as the shard of a mesh whose last dimension has one rank, in a storage of its own."""
    local = parameter.detach()
    local = local if local.is_meta else local.clone(memory_format=torch.contiguous_format)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))  # as FSDP2 has them
    whole = DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


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


def _sum_over_ranks(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the sums of the gradients over the ranks, by one collective; they are views of one tensor."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
