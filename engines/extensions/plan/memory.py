"""Memory of a training phase in bytes, computed from shapes alone."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fluvial.engines.engine.config import DTYPES, EngineConfig, OptimizerConfig
from fluvial.engines.engine.module import largest_bucket
from fluvial.engines.engine.optimizers import OPTIMIZERS
from fluvial.engines.engine.parallelize import (
    cast_samples,
    checkpoint_blocks,
    is_whole,
    quantise_base,
    replicas,
    swapped_blocks,
)
from fluvial.engines.extensions.simulate.operators import run_attention
from fluvial.engines.offload import count_copied_bytes, list_frozen_tensors
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.lora import is_adapter
from fluvial.models.quantised import FORMATS, find_frozen_linear

Phase = Literal["update", "rollout"]
Forward = Callable[[nn.Module], Tensor]  # forward pass of one micro-batch; returns the input of the loss


class ActivationSpan(NamedTuple):
    """Bytes of the activations while a unit of communication computes: a block, or the layers outside of blocks."""

    unit: int  # number of the block; the layers outside of blocks come last
    peak: int
    after: int = 0  # at its end
    backward: bool = False
    reduces: bool = False  # whether the gradients of all its parameters are complete at its end


class Accounting(NamedTuple):
    """Bytes by kind at the peak of a phase on one rank's device, and separately those on its host."""

    # Sharded; `engine.masters` for trained parameters, float32 for adapters, the compute dtype for the rest.
    parameters: int
    buffers: int  # on every rank; includes codes and scales of quantised weights
    moments: int  # optimizer state, sharded
    average: int  # float32, sharded
    reference: int  # frozen copies of the parameters, in the compute dtype, sharded
    gradients: int  # in the dtype of the masters, sharded
    gathered: int  # unsharded parameters, in the compute dtype
    unsharded_gradients: int  # accumulated gradients beyond `gradients`, in the dtype of the reduction
    communication: int  # of a unit, as far as it adds to the activations' peak: its gradients, or its gathered parameters
    activations: int  # of one micro-batch
    trajectory: int  # stored tensors of a rollout
    host: int
    copied: int = 0  # copied from the host per pass, with swapped blocks
    graph: int = 0  # CUDA graph of a rollout, with `engine.compile` reduce-overhead, beyond `activations`

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self) - self.host - self.copied


def account(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    optimizer: OptimizerConfig,
    engine: EngineConfig,
    device: torch.device,
    ranks: int,
    activations: Sequence[ActivationSpan],
    trajectory: int = 0,
    micro_batches: int = 2,
    frozen: int = 0,
    learners: int = 1,
    phase: Phase = "update",
) -> Accounting:
    """Return the bytes held at the peak of a phase on the first rank, which has the largest shards.

    The peak of an update is in the last micro-batch's backward pass: within a unit, or where the unit's gradients are
    reduced and its activations are freed. With P parameters, T of them trained, c bytes per value for the computation, g for
    the reduction, m for masters, and R ranks per replica:

        parameters (m T + c (P - T)) / R    moments 8 T / R with AdamW    average 4 T / R    gradients m T / R
        gathered c P with comm="keep", else the layers outside of blocks, the block that computes, and the buffers of their
            gather; in the backward pass the next block instead of the buffers
        unsharded gradients g T if they are kept for several micro-batches, until they become `gradients`

    Weights quantised by `engine.base` count as buffers, with their codes and scales, and are never gathered.

    A rank that holds all parameters (`parallelize.is_whole`) gathers none, and copies only those whose dtype is not the
    compute dtype. Several such ranks sum their gradients in buckets.

    With offload="always" all sharded tensors are on the host; with "phases" moments, average and reference during a rollout;
    with "blocks" or a number the frozen weights of blocks, except for two on the device.

    Args:
        module: module to train, with its adapters, on any device and not sharded.
        blocks: repeated blocks of the module.
        optimizer, engine: configuration of the engine.
        device: device of the computation, which decides compute="auto".
        ranks: number of processes.
        activations: see `measure_activations`.
        trajectory: bytes of the stored tensors of a rollout.
        micro_batches: number of micro-batches per update and rank.
        frozen: number of frozen copies: the reference of a KL term in full fine-tuning, and teachers.
        learners: number of networks that learn in turn, each with its own trained parameters and moments.
        phase: "update", or "rollout" for forward passes without gradient.

    Raises:
        ValueError: `engine.replicas` does not divide the ranks.
    """
    copies, update = replicas(module, engine, ranks=ranks), phase == "update"
    if ranks % copies:
        raise ValueError(f"account: {ranks} ranks, expected a multiple of the {copies} replicas")
    shards = ranks // copies
    compute, reduce = engine.compute_dtype(device).itemsize, DTYPES[engine.reduce].itemsize
    trained = [p for p in module.parameters() if p.requires_grad]
    kept = [(name, p) for name, p in module.named_parameters() if p.requires_grad or is_adapter(name)]
    codes = _measure_quantised(module, blocks, engine)
    swapped = [list_frozen_tensors(block) for block in swapped_blocks(module, blocks, engine)]
    moving = [sum(codes.get(p, compute * p.numel()) for p in block) for block in swapped]
    excluded = {p for block in swapped for p in block}
    codes_here = sum(size for p, size in codes.items() if p not in excluded)
    excluded |= codes.keys()
    frozen_here = [p for name, p in module.named_parameters() if not (p.requires_grad or is_adapter(name) or p in excluded)]
    sizes_of = {p: 4 if is_adapter(name) else DTYPES[engine.masters].itemsize for name, p in kept}
    masters = sum(sizes_of[p] * _count_sharded([p], shards) for p in trained)
    parameters = sum(size * _count_sharded([p], shards) for p, size in sizes_of.items()) + (learners - 1) * masters
    parameters += compute * _count_sharded(frozen_here, shards)
    kind = OPTIMIZERS[optimizer.name]
    moments = learners * sum(kind.nbytes(tuple(p.shape), optimizer, ranks=shards) for p in trained)
    average = 4 * _count_sharded(trained, shards) if optimizer.ema_decay else 0
    gradients = masters if update else 0
    base = [p for name, p in module.named_parameters() if not (is_adapter(name) or p in excluded)]
    sharded = {
        "parameters": parameters,
        "moments": moments,
        "average": average,
        "reference": frozen * compute * _count_sharded(base, shards),
        "gradients": gradients,
    }
    in_phases = () if update else ("moments", "average", "reference")
    on_host = in_phases if engine.offload == "phases" else tuple(sharded) if engine.offload == "always" else ()
    here = {name: 0 if name in on_host else size for name, size in sharded.items()}
    accumulated = 0
    if update and micro_batches > 1 and engine.grad_sync == "last":
        accumulated = reduce * sum(p.numel() for p in trained)
    units, whole = _list_units(module, blocks), is_whole(module, engine, ranks=ranks)
    sizes = [sum(parameter.numel() for parameter in unit if parameter not in codes) for unit in units]
    trainable = [sum(parameter.numel() for parameter in unit if parameter.requires_grad) for unit in units]
    if whole and any(sizes_of[p] != reduce for p in trained):
        accumulated = here["gradients"] + reduce * sum(trainable) if update else 0
    elif whole:
        accumulated = 0
    two_blocks = max((sum(pair) for pair in pairwise([*moving, *moving[:1]])), default=0)
    reducing = [number for number, span in enumerate(activations) if span.reduces]

    def measure_gathered(span: ActivationSpan) -> int:
        if whole:
            return sum(compute * p.numel() for p, size in sizes_of.items() if size != compute) + two_blocks
        if engine.comm == "keep":
            return compute * sum(sizes)
        *inside, rest = sizes
        of_block = inside[span.unit] if span.unit < len(inside) else 0
        other = of_block if not span.backward else inside[span.unit - 1] if 0 < span.unit <= len(inside) else 0
        return compute * (rest + of_block + (other if shards > 1 else 0))

    def measure_communication(number: int, span: ActivationSpan) -> int:
        if whole:
            bucket = largest_bucket([reduce * p.numel() for p in trained]) if update and ranks > 1 else 0
            return max(0, bucket - span.peak)  # after the backward pass
        if not update:  # the buffer of the last unit's gather
            return compute * max(sizes) if shards > 1 and engine.comm == "keep" else 0
        each = reduce * (1 if shards > 1 else 2)  # a single rank makes one more copy, to divide
        before = next((activations[other].unit for other in reversed(reducing) if other < number), None)
        extra = each * trainable[before] if before is not None and not accumulated else 0
        # Accumulated gradients are freed as they are reduced, so only the first reduction adds to them.
        if span.reduces and (before is None or not accumulated):
            computed = 0 if accumulated else compute * trainable[span.unit]
            extra = max(extra, span.after + computed + each * trainable[span.unit] - span.peak)
        return max(0, extra)

    estimates = [
        (measure_gathered(span), measure_communication(number, span), span.peak) for number, span in enumerate(activations)
    ]
    parts = dict(zip(("gathered", "communication", "activations"), max(estimates, key=sum), strict=True))
    return Accounting(
        **here,
        **parts,
        buffers=sum(buffer.nbytes for buffer in module.buffers()) + (1 + frozen) * codes_here,
        unsharded_gradients=max(0, accumulated - here["gradients"]),
        trajectory=trajectory,
        host=sum(sharded[name] for name in on_host) + (1 + frozen) * sum(moving),
        copied=count_copied_bytes(moving, backward=update),
    )


def measure_activations(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Forward,
    *,
    engine: EngineConfig,
    device: torch.device,
    grad: bool,
) -> tuple[ActivationSpan, ...]:
    """Return the bytes of a forward pass (and, with `grad`, its backward pass) beyond parameters and their gradients.

    The passes run on the meta device, on a copy of the module, with the engine's dtype and checkpointing. Saved and
    temporary tensors count while they live. Attention is assumed to run in a fused kernel, which stores no scores. The
    result is divided by the degree of context_parallel.

    Args:
        module: module on the meta device, not sharded.
        blocks: repeated blocks of the module.
        forward: forward pass of one micro-batch, whose inputs are on the meta device.
        engine: configuration of the engine.
        device: device of the computation, which decides compute="auto".
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
    for unit in [*blocks, module]:
        unit.forward = _FusedAttention(unit.forward)
        cast_samples(unit, dtype)
    quantise_base(module, blocks, engine, dtype)
    checkpoint_blocks(blocks, engine)
    live = LiveStorages([*module.parameters(), *module.buffers()], meta=True)
    units = _list_units(module, blocks)
    recorder = _SpanRecorder(live, units, list(blocks))
    with live, torch.set_grad_enabled(grad):
        out = forward(module)
        if grad:
            recorder.begin_backward()
            out.float().square().sum().backward()
        recorder.end()
    split = engine.context_parallel
    return tuple(each._replace(peak=each.peak // split, after=each.after // split) for each in recorder.spans)


class _SpanRecorder:
    """Recorder of the spans of a pass, by hooks. Each gradient is freed as it arrives."""

    def __init__(self, live: LiveStorages, units: list[list[nn.Parameter]], blocks: list[nn.Module]) -> None:
        self.live, self.spans = live, list[ActivationSpan]()
        self.unit = self.rest = len(blocks)
        self.backward = False
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._note_forward, number))
            block.register_forward_hook(partial(self._note_forward, self.rest))
        for number, unit in enumerate(units):
            missing = {parameter for parameter in unit if parameter.requires_grad}
            for parameter in missing:
                parameter.register_post_accumulate_grad_hook(partial(self._free_gradient, number, missing))

    def begin_backward(self) -> None:
        """Begin the backward pass, in the last block."""
        self.end()
        self.unit, self.backward = self.rest - 1 if self.rest else self.rest, True

    def end(self, *, reduces: bool = False) -> None:
        """End the current span."""
        self.spans.append(ActivationSpan(self.unit, self.live.peak, self.live.now, self.backward, reduces))
        self.live.peak = self.live.now

    def _note_forward(self, number: int, *_: Any) -> None:
        if not self.backward:  # checkpointing calls the hook again in the backward pass
            self.end()
            self.unit = number

    def _free_gradient(self, number: int, missing: set[nn.Parameter], parameter: Any) -> None:
        parameter.grad = None
        missing.discard(parameter)
        if not missing:
            self.unit = number
            self.end(reduces=True)
            self.unit = number - 1 if 0 < number < self.rest else self.rest


class _FusedAttention(TorchFunctionMode):
    """Forward function whose attention runs in a fused kernel on the meta device, where PyTorch would not choose one.

    The mode is entered in the forward function, because checkpointing calls it again in the backward pass.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward
        self.__signature__ = inspect.signature(forward)  # modular pipelines read which arguments it takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.forward(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = run_attention if func is nn.functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))


def _count_sharded(parameters: Iterable[Tensor], ranks: int) -> int:
    """Return the number of values on the first rank, which has the largest share of the first dimension."""
    return sum(math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:]) for p in parameters)


def _measure_quantised(module: nn.Module, blocks: Sequence[nn.Module], engine: EngineConfig) -> dict[Tensor, int]:
    """Return the bytes of each weight quantised by `engine.base`; every rank holds all of them."""
    if engine.base == "auto":
        return {}
    layers = [layer for part in blocks or [module] for _, _, layer in find_frozen_linear(part)]
    return {layer.weight: FORMATS[engine.base].nbytes(layer.weight.shape) for layer in layers}


def _list_units(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit of communication: the blocks, then the layers outside of blocks."""
    inside = [list(block.parameters()) for block in blocks]
    taken = {id(parameter) for unit in inside for parameter in unit}
    return [*inside, [parameter for parameter in module.parameters() if id(parameter) not in taken]]
