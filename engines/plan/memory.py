"""Memory of a training phase in bytes: measured as live storages, and accounted for from shapes alone."""

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fluvial.engines.fsdp.optimizer import OptimizerConfig
from fluvial.engines.fsdp.optimizers import OPTIMIZERS
from fluvial.engines.fsdp.parallelize import DTYPES, EngineConfig, cast_samples, checkpoint_blocks
from fluvial.models.lora import is_adapter

Phase = Literal["update", "rollout"]
Forward = Callable[[nn.Module], Tensor]  # a forward pass of one micro-batch, to a tensor that the loss is made of


class LiveStorages(TorchDispatchMode):
    """Track the bytes of every storage that an operation reads or writes while the mode is on, and their largest sum.

    A storage counts once however many tensors view it, from the first operation that touches it until it is freed, with
    the size that it has after each operation: FSDP frees and fills storages by resizing them. It works on any device, and in
    the backward pass, to whose threads PyTorch hands the mode. It does not see what an operation allocates and frees within
    itself (workspaces), nor what an allocator holds beyond the sizes asked for.

    Args:
        exclude: tensors whose storages are not counted, whenever they are touched: what was there before.
        meta: count the storages on the meta device, which would be allocated on another, and only those. Without it they
            are passed over (PyTorch makes some to find out shapes).
    """

    def __init__(self, exclude: Iterable[Tensor] = (), *, meta: bool = False) -> None:
        super().__init__()
        # Held while the mode lives, so that no new storage takes an excluded one's id.
        self._excluded = {id(storage): storage for storage in map(_storage, exclude)}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._meta, self._sum = meta, 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes of the storages that are alive."""
        live = (reference() for reference, _ in list(self._live.values()))
        return sum(storage.nbytes() for storage in live if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back here as operations on its local tensors
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._track(_storage(leaf))
        # Nothing resizes storages on the meta device, and to look at thousands after each operation takes long.
        self.peak = max(self.peak, self._sum if self._meta else self.now)
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._excluded and key not in self._live and (storage.device.type == "meta") == self._meta:
            self._live[key] = weakref.ref(storage, lambda _: self._forget(key)), size
            self._sum += size

    def _forget(self, key: int) -> None:
        self._sum -= self._live.pop(key)[1]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, of a sharded one that of this rank's part."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


class Accounting(NamedTuple):
    """Bytes by kind at the peak of a phase, on one rank's device; and apart what waits on its host."""

    parameters: (
        int  # float32 masters of what is trained and of adapters, and the rest in the dtype of the computation; sharded
    )
    buffers: int  # on every rank
    moments: int  # AdamW's two and its step counts, float32, sharded
    average: int  # float32, sharded
    reference: int  # a frozen copy of the parameters, in the dtype of the computation, sharded
    gradients: int  # float32, sharded
    gathered: int  # parameters, unsharded, in the dtype of the computation
    unsharded_gradients: int  # what accumulated gradients take beyond `gradients`, in the dtype of the reduction
    communication: int  # gradients of one unit (block or rest) as they were computed, and as they are reduced
    activations: int  # of one micro-batch
    trajectory: int  # what a rollout stored
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self) - self.host


def account(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    optimizer: OptimizerConfig,
    engine: EngineConfig,
    device: torch.device,
    ranks: int,
    activations: int,
    trajectory: int = 0,
    micro_batches: int = 2,
    reference: bool = False,
    phase: Phase = "update",
) -> Accounting:
    """Return the bytes that the engine holds on the first rank, which has the largest shards, at the peak of a phase.

    The peak of an update is at the start of the last micro-batch's backward pass, or in it. With P parameters, T of them
    trained, in c bytes for the computation and g for the reduction, on R ranks of one replica:

        parameters (4 T + c (P - T)) / R    moments 8 T / R    average 4 T / R    gradients 4 T / R
        gathered c P with comm="keep"; else that of the module's rest and two blocks
        unsharded gradients g T if they are kept for several micro-batches, until they become `gradients`

    With offload="always" what is sharded is on the host; with "phases" moments, average and reference are, in a rollout.

    Args:
        module: what is trained, adapters included; on any device, not yet sharded.
        blocks: its repeated blocks.
        optimizer, engine: as the engine takes them.
        device: to compute on; decides what compute="auto" is.
        ranks: processes in all.
        activations: bytes, see `activations`.
        trajectory: bytes of what a rollout stored.
        micro_batches: of an update.
        reference: whether a frozen copy is kept for a KL term, as full fine-tuning needs it.
        phase: "update" or "rollout": forward passes without gradient.

    Raises:
        ValueError: the ranks are no multiple of the replicas.
    """
    if ranks % engine.replicas:
        raise ValueError(f"account: {ranks} ranks, expected a multiple of the {engine.replicas} replicas")
    shards, update = ranks // engine.replicas, phase == "update"
    compute, reduce = engine.compute_dtype(device).itemsize, DTYPES[engine.reduce].itemsize
    trained = [p for p in module.parameters() if p.requires_grad]
    masters = [p for name, p in module.named_parameters() if p.requires_grad or is_adapter(name)]
    frozen = [p for name, p in module.named_parameters() if not (p.requires_grad or is_adapter(name))]
    parameters = 4 * _sharded(masters, shards) + compute * _sharded(frozen, shards)
    row = OPTIMIZERS[optimizer.name]
    moments = sum(row.nbytes(tuple(p.shape), optimizer, ranks=shards) for p in trained)
    average = 4 * _sharded(trained, shards) if optimizer.ema_decay else 0
    gradients = 4 * _sharded(trained, shards) if update else 0
    held = {
        "parameters": parameters,
        "moments": moments,
        "average": average,
        "reference": compute * _sharded(module.parameters(), shards) if reference else 0,
        "gradients": gradients,
    }
    in_phases = () if update else ("moments", "average", "reference")
    away = {"none": (), "phases": in_phases, "always": tuple(held)}[engine.offload]
    here = {kind: 0 if kind in away else size for kind, size in held.items()}
    accumulated = 0
    if update and micro_batches > 1 and engine.grad_sync == "last":
        accumulated = reduce * sum(p.numel() for p in trained)
    units = _units(module, blocks)
    return Accounting(
        **here,
        buffers=sum(buffer.nbytes for buffer in module.buffers()),
        gathered=compute * _gathered(units, keep=engine.comm == "keep", ahead=shards > 1),
        unsharded_gradients=max(0, accumulated - here["gradients"]),
        # A single rank copies once more, to divide.
        communication=(compute + reduce * (1 if shards > 1 else 2)) * _largest_trained(units) if update else 0,
        activations=activations,
        trajectory=trajectory,
        host=sum(held[kind] for kind in away),
    )


def activations(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Forward,
    *,
    engine: EngineConfig,
    device: torch.device,
    grad: bool,
) -> int:
    """Return the peak bytes of a forward pass (and, with `grad`, its backward pass) beyond parameters and their gradients.

    The passes run on the meta device, on a copy of the module, with the engine's dtype and checkpointing: saved tensors and
    temporary ones both count, each as long as it lives. Attention is taken to run in a fused kernel, which keeps no scores.
    With context_parallel the result is divided by its degree.

    Args:
        module: on the meta device, not yet sharded.
        blocks: its repeated blocks.
        forward: a forward pass of one micro-batch, whose inputs are on the meta device.
        engine: as the engine takes it.
        device: to compute on; decides what compute="auto" is.
        grad: whether a backward pass follows.

    Raises:
        ValueError: the module is not on the meta device.
    """
    if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError("activations: the module has values, expected it on the meta device")
    module, blocks = copy.deepcopy((module, list(blocks)))
    dtype = engine.compute_dtype(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for unit in [*blocks, module]:
        unit.forward = _FusedAttention(unit.forward)
        cast_samples(unit, dtype)
    if engine.checkpointing != "none":
        checkpoint_blocks(blocks, selective=engine.checkpointing == "selective")
    with LiveStorages([*module.parameters(), *module.buffers()], meta=True) as live, torch.set_grad_enabled(grad):
        out = forward(module)
        if grad:
            out.float().square().sum().backward()
    return live.peak // engine.context_parallel


class _FusedAttention(TorchFunctionMode):
    """A forward function whose attention runs in a fused kernel on the meta device too, where PyTorch would not choose one.

    It is entered in the forward itself, because checkpointing runs that again in the backward pass.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.forward(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _fused_attention if func is nn.functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by a fused kernel, with the arguments of `scaled_dot_product_attention`."""
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _sharded(parameters: Iterable[Tensor], ranks: int) -> int:
    """Return the number of values on the first rank: FSDP splits the first dimension, and no rank gets more than it."""
    return sum(math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:]) for p in parameters)


def _units(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit of communication: the blocks, and last the module's rest."""
    inside = [list(block.parameters()) for block in blocks]
    taken = {id(parameter) for unit in inside for parameter in unit}
    return [*inside, [parameter for parameter in module.parameters() if id(parameter) not in taken]]


def _gathered(units: list[list[nn.Parameter]], *, keep: bool, ahead: bool) -> int:
    """Return the number of values that are unsharded at a time: all, or the rest, a block and what is fetched ahead."""
    *blocks, rest = [sum(parameter.numel() for parameter in unit) for unit in units]
    return rest + sum(sorted(blocks, reverse=True)[: None if keep else 2 if ahead else 1])


def _largest_trained(units: list[list[nn.Parameter]]) -> int:
    """Return the number of trained values of the unit that has most."""
    return max(sum(parameter.numel() for parameter in unit if parameter.requires_grad) for unit in units)
