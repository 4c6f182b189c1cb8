"""Comparison of a plan with the bytes of updates that run on this machine."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fluvial.engines.engine.engine import Engine, LossFn
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.plan.plan import PlanConfig, build_pass_shape, plan
from fluvial.engines.run.log.progress import table
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.models.device import find_default_device, is_accelerator
from fluvial.models.lora import add_lora
from fluvial.models.shapes import MODELS, list_blocks

# The plan adds up peaks that need not coincide, so it may exceed the measured peak by this fraction.
EXCESS = 0.2


class ComparedBytes(NamedTuple):
    """Planned and measured bytes of one kind."""

    kind: str
    planned: int
    measured: int
    most: int  # largest planned size that agrees

    @property
    def agrees(self) -> bool:
        """Whether the plan covers the measured bytes without exceeding them by much."""
        return self.measured <= self.planned <= self.most


class Loss(NamedTuple):
    """Diagnostics of the loss of a comparison."""

    loss: Tensor


def check(name: str, config: PlanConfig, *, console: Console) -> None:
    """Run updates of a transformer with random weights, and print planned and measured bytes.

    Parameters and optimizer state must agree to the byte. For gradients, and for the peak of activations and unsharded
    tensors, the plan must cover the measured bytes and may exceed them by a fifth.

    Raises:
        UsageError: the transformer is too large for a CPU, or the number of ranks is not the plan's number of GPUs.
        RunError: plan and measurement do not agree.
    """
    if name != "handwriting" and not is_accelerator(find_default_device()):
        raise UsageError(
            f"`check` runs the transformer on this machine, and {name} is too large for a CPU: use handwriting or a GPU"
        )
    with init_world() as world:
        if world.size != config.gpus:
            raise UsageError(
                f"`check` runs on {world.size} process(es), and the plan is for {config.gpus} GPUs: use as many processes"
            )
        compared = compare(build_case(name, config, world))
        if world.is_main:
            rows = {row.kind: (f"{row.planned:,}", f"{row.measured:,}", "yes" if row.agrees else "NO") for row in compared}
            console.print(table(f"{name}, {config.train}: bytes", ("planned", "measured", "agrees"), rows), highlight=False)
        if wrong := [row.kind for row in compared if not row.agrees]:
            raise RunError(f"the plan does not agree with what was measured: {', '.join(wrong)}")


class PlanCase(NamedTuple):
    """Plan, its engine over a network with random weights, and the arguments of its updates."""

    name: str
    config: PlanConfig
    engine: Engine
    items: dict[str, Tensor]
    loss: LossFn
    micro_batch: int


def build_case(name: str, config: PlanConfig, world: World) -> PlanCase:
    """Build the engine of a plan with random weights, and random items; frozen weights have the compute dtype.

    Args:
        name: name of a network that fits on the device.
        config: plan.
        world: process group that runs the updates.
    """
    model, device = MODELS[name], world.device
    kept, lora = torch.get_default_dtype(), config.train == "lora"
    torch.set_default_dtype(config.engine.compute_dtype(device) if lora else kept)
    try:
        with device:
            module = model.build()
    finally:
        torch.set_default_dtype(kept)
    if lora:
        add_lora(module, config.lora, model.lora_targets)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    engine = Engine(module, list_blocks(model, module), config.optimizer, world, updates=10, sharding=config.engine)
    micro_batch = config.micro_batch or model.micro_batch
    count = micro_batch * config.micro_batches
    shape = build_pass_shape(model, config.pipeline, config.steps, guided=config.guidance)
    inputs, larger = (model.build_inputs(samples, shape) for samples in (count, count + 1))
    tensors = {key: torch.rand(value.shape, device=device) for key, value in inputs.items() if isinstance(value, Tensor)}
    items = {key: value for key, value in tensors.items() if larger[key].shape != value.shape}
    shared = {key: value for key, value in tensors.items() if key not in items}
    lists = {key: value for key, value in inputs.items() if key not in tensors}  # an equal entry per sample

    def loss_fn(batch: dict[str, Tensor]) -> tuple[Tensor, Loss]:
        each = {key: value[: len(batch["timestep"])] for key, value in lists.items()}
        loss = engine.module(**batch, **shared, **each, return_dict=False)[0].float().square().flatten(1).sum(1)
        return loss, Loss(loss.detach())

    return PlanCase(name, config, engine, items, loss_fn, micro_batch)


def compare(case: PlanCase) -> list[ComparedBytes]:
    """Return planned and measured bytes on this rank, of a case whose engine has made no update yet."""
    name, config, engine, items, loss_fn, micro_batch = case
    device, count = engine.world.device, len(items["timestep"])
    # Devices are not compared, so the plan puts nothing on the host.
    anywhere = replace(config, engine=replace(config.engine, offload="none"))
    planned = plan(name, anywhere, device=device).update
    measured = measure(engine, items, torch.ones(count, device=device), loss_fn, micro_batch=micro_batch)
    rows = [
        # Parameters without a gradient, such as the text branch of a last block, are planned with one.
        ComparedBytes(kind, planned._asdict()[kind], size, most=int((1 + EXCESS) * size) if kind == "gradients" else size)
        for kind, size in measured._asdict().items()
        if kind != "peak"
    ]
    copies = plan(name, config, device=device).update  # depends on the offload: without it one rank may need no copies
    gradients = planned.gradients + planned.unsharded_gradients
    allocated = copies.gathered + copies.communication + gradients + planned.activations
    return [*rows, ComparedBytes("allocated at the peak", allocated, measured.peak, most=int((1 + EXCESS) * measured.peak))]


class MeasuredBytes(NamedTuple):
    """Bytes held by an engine on a rank, and the peak that an update allocates beyond them."""

    parameters: int
    buffers: int
    moments: int
    average: int
    gradients: int  # before the optimizer's step
    peak: int


def measure(engine: Engine, items: dict[str, Tensor], weight: Tensor, loss_fn: LossFn, *, micro_batch: int) -> MeasuredBytes:
    """Make two updates, and return the bytes of the second.

    Args:
        engine: engine that has made no update yet.
        items, weight, loss_fn, micro_batch: as in `Engine.update`, with the same number of items on every rank.
    """
    gradients: list[int] = []

    def before_step(*_: Any) -> None:
        gradients.append(_count_bytes(p.grad for p in engine.trainable.values() if p.grad is not None))

    def update() -> None:
        count = weight.shape[0]
        engine.update(items, loss_fn, weight, count=count, micro_batch=micro_batch, pad_to=count)

    hook = engine.optimizer.register_step_pre_hook(before_step)
    update()
    hook.remove()
    module = engine.module
    moments = [
        part for state in engine.optimizer.state.values() for tensor in state.values() for part in _list_parts(tensor)
    ]
    existing = [*module.parameters(), *module.buffers(), *moments, *engine.average.values(), *items.values(), weight]
    with LiveStorages(existing) as live:
        update()
    return MeasuredBytes(
        parameters=_count_bytes(module.parameters()),
        buffers=_count_bytes(module.buffers()),
        moments=_count_bytes(moments),
        average=_count_bytes(engine.average.values()),
        gradients=max(gradients),
        peak=live.peak,
    )


def _list_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of this rank's part of an optimizer state; a quantised state has several."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(local):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's parts of tensors."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)
