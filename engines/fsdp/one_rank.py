"""One rank: parameters that are sharded in name only, without the copies, hooks and streams of FSDP2.

On a single rank a shard is the whole parameter. FSDP2 would still gather it into a second copy. Here the module computes
with plain parameters that share the shards' storage, and holds the shards themselves whenever FSDP2 would.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fluvial.engines.fsdp.optimizer_state import sharded_like


class Slot(NamedTuple):
    """A place in the module where a parameter is registered."""

    owner: nn.Module
    name: str


class Parameters:
    """The parameters of a module, registered either as shards or as plain parameters that share the shards' storage.

    Args:
        module: module whose parameters become shards.
        mesh: mesh of one rank.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.reshard_after_backward = True
        self._queued = False
        self._shards: dict[Slot, nn.Parameter] = {}  # while plain parameters are registered
        self._plain: dict[nn.Parameter, tuple[Tensor, nn.Parameter]] = {}  # local tensor and plain parameter of each shard
        self._slots = [
            Slot(owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None
        ]
        made: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that two modules share stays shared
        for owner, name in self._slots:
            parameter = owner._parameters[name]
            assert parameter is not None
            if parameter not in made:
                made[parameter] = _shard(parameter, mesh)
            owner._parameters[name] = made[parameter]

    def unshard(self) -> None:
        """Register the plain parameters, which nothing is copied for."""
        if self._shards:
            return
        for slot in self._slots:
            shard = slot.owner._parameters[slot.name]
            assert isinstance(shard, nn.Parameter)
            self._shards[slot] = shard
            slot.owner._parameters[slot.name] = self._plain_of(shard)

    def reshard(self) -> None:
        """Register the shards; they hold the gradients."""
        for slot, shard in self._shards.items():
            slot.owner._parameters[slot.name] = shard
            self._plain[shard][1].grad = None
        self._shards.clear()

    def reset(self) -> None:
        """Register the shards, and forget the backward pass that an exception ended halfway."""
        self._queued = False
        self.reshard()

    def _plain_of(self, shard: nn.Parameter) -> nn.Parameter:
        assert isinstance(shard, DTensor)
        local = shard._local_tensor
        known = self._plain.get(shard)
        if known is None or known[0] is not local:
            plain = nn.Parameter(local.detach(), requires_grad=shard.requires_grad)
            if plain.requires_grad:
                plain.register_post_accumulate_grad_hook(lambda plain, shard=shard: self._accumulated(shard, plain))
            self._plain[shard] = known = (local, plain)
        plain = known[1]
        plain.grad = shard.grad._local_tensor if isinstance(shard.grad, DTensor) else None
        return plain

    def _accumulated(self, shard: Any, plain: Tensor) -> None:
        """Let the shard hold the plain parameter's gradient, and end the backward pass as FSDP2 does."""
        if shard.grad is None or shard.grad._local_tensor is not plain.grad:
            assert plain.grad is not None
            shard.grad = sharded_like(shard, plain.grad)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._queued = False
        if self.reshard_after_backward:
            self.reshard()


class OneRankModule(FSDPModule):
    """A unit of a module on one rank, with the interface of FSDP2. The units of a module share their `Parameters`."""

    _orig_cls_mro_index = 3
    _one_rank: Parameters

    def reshard(self) -> None:
        """Register the shards of all units."""
        self._one_rank.reshard()

    def unshard(self, async_op: bool = False) -> None:
        """Register plain parameters in all units."""
        self._one_rank.unshard()

    def reset_iter_state(self) -> None:
        """Register the shards after a pass that an exception ended halfway."""
        self._one_rank.reset()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Do nothing: there is no other rank."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: no reduction is pending."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the shards are registered after each backward pass; for all units, so only with `recurse`."""
        if recurse:
            self._one_rank.reshard_after_backward = reshard_after_backward

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


def keep_whole(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Make the blocks and the module units as `fully_shard` does, on one rank, in place."""
    parameters = Parameters(module, mesh)
    for unit in dict.fromkeys([*blocks, module]):
        kind = type(unit)
        unit.__class__ = type(f"FSDP{kind.__name__}", (OneRankModule, kind), {})
        object.__setattr__(unit, "_one_rank", parameters)
        unit.register_forward_pre_hook(_unshard, prepend=True)
    module.register_state_dict_pre_hook(_reshard)


def _unshard(unit: Any, args: tuple) -> None:
    unit.unshard()


def _reshard(module: Any, *_: Any) -> None:
    module.reshard()


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter as the shard of a mesh of one rank, in a storage of its own."""
    local = parameter.detach()
    local = local if local.is_meta else local.clone(memory_format=torch.contiguous_format)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    whole = DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
