"""The engine: a sharded module, its optimizer, and updates on flat sets of weighted items.

It knows modules, parameters, the optimizer, devices and ranks. The caller defines what an item is (a pair of sample and
step, a noised image) and what its loss means, by a pytree and a function.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from optree import PyTree, tree_leaves
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from fluvial.core import ema
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig, lr_factor
from fluvial.engines.engine.items import Diagnostics, Numbers, PartNumbers, check_items, micro_batches, split
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.optimizers import OPTIMIZERS, frozen_by_eps, list_saved
from fluvial.engines.engine.shards import local, set_lr, shard_like
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.gathered import gather_weights
from fluvial.engines.offload import HostOffload
from fluvial.engines.waits import count_parts
from fluvial.models.flops import FlopCounter
from fluvial.models.lora import is_adapter
from fluvial.models.protocol import Weights

# Loss scaling with compute="float16", as in torch.amp.GradScaler: initial scale, and steps until it doubles.
INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
# loss_fn(items) -> loss [b], or (loss [b], diagnostics: a NamedTuple of [b] tensors without gradient)
LossFn = Callable[[PyTree[Tensor]], Tensor | tuple[Tensor, Any]]


class UpdateInfo(NamedTuple):
    """Diagnostics of one update, read back from the device once."""

    loss: float  # weighted sum over the items of all ranks, divided by the count
    grad_norm: float  # before clipping
    lr: float
    skipped: bool
    mean: dict[str, float]  # mean of each diagnostic over the computed items
    max_abs: dict[str, float]
    items: int  # computed items of all ranks
    flops: int  # of this rank's forward and backward passes, without recomputation by checkpointing
    parts: PartNumbers | None = None  # diagnostics per part, if the items are split
    memory: tuple[float, ...] = ()  # largest `World.peak_memory` of the ranks, in bytes


class Engine:
    """A module sharded with FSDP2, its optimizer, learning-rate schedule and moving average.

    Train any module on any loss over a pytree of items:

    >>> import torch
    >>> from fluvial.engines import Engine, OptimizerConfig, init_world
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    >>> with init_world():
    ...     engine = Engine(net, config=OptimizerConfig(lr=0.01))
    ...     for _ in range(300):
    ...         info = engine.update({"x": x, "y": x**2}, lambda b: (net(b["x"]) - b["y"]).square().mean(1))
    >>> info.loss < 0.01
    True

    Memory per parameter: that of `ShardedModule`, and per trained parameter, with R ranks per replica, 8 / R bytes for
    AdamW's moments, 4 / R for the moving average if enabled, and 4 / R for the sharded gradient during an update; on the
    CPU with offload="always". An update also needs unsharded gradients in the reduction dtype: all of them with
    grad_sync="last", else those of one block. `fluvial plan` computes the total, also for other optimizers.

    Args:
        module: module as accepted by `ShardedModule`, or a `ShardedModule`; several engines may share one and train other
            parameters of it. Parameters that do not require gradients stay frozen.
        blocks: repeated blocks of the module; each is one unit of communication. By default `find_blocks(module)`.
        config: optimizer, schedule, clipping and moving average.
        world: process group the module is sharded over. By default the one of the enclosing `init_world()`.
        updates: planned number of updates, for the learning-rate schedule. A constant schedule does not need it.
        sharding: sharding, precision, checkpointing and offload of the module.
        weights: model folder from which parameters on the meta device are read.
        parameters: names of the parameters that are trained; by default those that require gradients.

    Raises:
        UsageError: the configuration does not fit the module or the ranks, or the optimizer's package is missing.
        ValueError: the module has no parameter to train, or the schedule needs `updates`.
    """

    def __init__(
        self,
        module: nn.Module | ShardedModule,
        blocks: Sequence[nn.Module] | None = None,
        config: OptimizerConfig | None = None,
        world: World | None = None,
        *,
        updates: int | None = None,
        sharding: EngineConfig | None = None,
        weights: Weights | None = None,
        parameters: Collection[str] | None = None,
    ) -> None:
        self.config = config or OptimizerConfig()
        shared = isinstance(module, ShardedModule)
        if not isinstance(module, ShardedModule):
            module = ShardedModule(module, blocks, world, sharding, weights=weights)
        self.sharded = module
        self.world, self.sharding = self.sharded.world, self.sharded.config
        self.module, self.compiles = self.sharded.module, self.sharding.compiles(self.world.device)
        named = dict(self.module.named_parameters())
        if parameters is not None and not {*parameters} <= {*named}:
            raise ValueError(f"Engine: the module has no parameter {min({*parameters} - {*named})}")
        trains = named if parameters is None else parameters
        self.trainable = {name: p for name, p in named.items() if p.requires_grad and name in trains}
        if not self.trainable:
            raise ValueError("Engine: the module has no parameter that requires a gradient")
        # Adapters that are not trained, e.g. the old policy's, are not in the base weights, so a checkpoint needs them.
        self.carried = {} if shared else {n: p for n, p in named.items() if is_adapter(n) and not p.requires_grad}
        self._rule = OPTIMIZERS[self.config.name]
        self._check_optimizer()
        self.optimizer = self._rule.build(self.trainable.values(), self.config)
        for parameter in self.trainable.values():  # now, so that checkpoints and offload see it
            self.optimizer.state[parameter] = self._rule.start(parameter, self.config)
        self.lr_factor = lr_factor(self.optimizer, self.config, updates=updates)
        self.average = ema.init(self._list_shards(torch.float32)) if self.config.ema_decay else {}
        self.updates = self.skipped = self.skipped_in_a_row = 0
        self._scales_loss = self.sharding.compute_dtype(self.world.device) == torch.float16
        self.scale, self.steady = INITIAL_SCALE if self._scales_loss else 1.0, 0  # loss scale; steps since it changed
        self.host = HostOffload(self.world.device)  # for optimizer state, average and gradients
        self.flops: dict[tuple[Any, ...], int] = {}  # of the model, per shapes of a micro-batch
        self._warned = False  # that eps exceeds the gradients
        self.stepping = False  # whether an optimizer step is in progress, so that the state belongs to no update
        self._keeps_gathered = False  # whether parameters gathered for inference stay for the next update

    def update(
        self,
        items: PyTree[Tensor],
        loss_fn: LossFn,
        weight: Tensor | None = None,
        *,
        count: float | None = None,
        micro_batch: int | Sequence[int] | None = None,
        pad_to: int | None = None,
        inputs: PyTree[Tensor] = (),
        parts: Tensor | None = None,
    ) -> UpdateInfo:
        """Take one optimizer step on sum(weight * loss_fn(items)) / count, where the sum is over the items of all ranks.

        Gradients are summed over ranks, not averaged, so the result does not depend on how items are split into
        micro-batches or over ranks. The micro-batch decides the memory.

        Args:
            items: pytree of tensors `[P, ...]`, this rank's part of the items. P >= 1 may differ between ranks.
            loss_fn: function of a micro-batch of items, see `LossFn`.
            weight: weight of each item in the loss, `[P]`; by default 1.
            count: divisor of the sum, the same on all ranks; by default the number of items of all ranks.
            micro_batch: number of items per forward and backward pass, the same on all ranks; by default `pad_to`. Several
                sizes are in descending order: each is used as often as it fits, and the last one for the remainder.
            pad_to: largest P over the ranks. Every rank pads to it with repeated items, masked out, so that all run the
                same micro-batches and collectives match. With several ranks, omitting it or `count` costs one small gather.
            inputs: tensors `[B, ...]` besides the items from which `loss_fn` reads rows; their shapes determine its FLOPs.
            parts: whether an item belongs to a part of the update, bool `[P, S]`; diagnostics are also averaged per part.

        Raises:
            ValueError: items, weights or losses have the wrong shape.
            RunError: the gradient was not finite in `max_skipped` updates in a row.
        """
        options = {"count": count, "micro_batch": micro_batch, "pad_to": pad_to, "inputs": inputs, "parts": parts}
        passes, diagnostics = self._prepare_passes(items, loss_fn, weight, **options)
        self._run_passes(passes)
        norm = self._unscale_gradients()
        packed = diagnostics.pack(self.world.peak_memory())[None]
        # One copy to the host per update, since each waits for the device; the norm is its last line.
        table = torch.cat([self.world.gather_data(packed), norm.to(packed).expand(1, packed.shape[1])]).tolist()
        info = self._apply_step(diagnostics.read(table[:-1]), grad_norm=table[-1][0], norm=norm)
        return info._replace(flops=diagnostics.flops)

    def accumulate(self, items: PyTree[Tensor], loss_fn: LossFn, weight: Tensor | None = None, **options: Any) -> None:
        """Add the gradient of items to the next update's gradient, without a step.

        The update must follow directly: a forward pass without gradient may run before both calls, but not between them.
        Arguments are as in `update`; diagnostics are dropped.
        """
        self._run_passes(self._prepare_passes(items, loss_fn, weight, **options)[0], last=False)

    def _prepare_passes(
        self,
        items: PyTree[Tensor],
        loss_fn: LossFn,
        weight: Tensor | None,
        *,
        count: float | None = None,
        micro_batch: int | Sequence[int] | None = None,
        pad_to: int | None = None,
        inputs: PyTree[Tensor] = (),
        parts: Tensor | None = None,
    ) -> tuple[list[Callable[[], None]], Diagnostics]:
        """Return functions that each add the gradient of one micro-batch, in order, and the diagnostics that they fill."""
        device = self.world.device
        sizes: Sequence[int] = (
            () if micro_batch is None else (micro_batch,) if isinstance(micro_batch, int) else tuple(micro_batch)
        )
        item_count = check_items(items, weight, sizes=sizes, pad_to=pad_to)
        if self.world.size > 1 and (count is None or pad_to is None):
            rank_counts = self.world.gather_data(torch.tensor([item_count])).tolist()
            count, pad_to = sum(rank_counts) if count is None else count, max(rank_counts) if pad_to is None else pad_to
        total, pad_to = item_count if count is None else count, item_count if pad_to is None else pad_to
        passes = split(pad_to, sizes or (pad_to,))
        weight = torch.ones(item_count, device=device) if weight is None else weight
        row_shapes = tuple(leaf.shape[1:] for leaf in tree_leaves((items, inputs)))
        real = torch.zeros(sum(passes), device=device)  # 0 for padding, which has the weight of the items that it repeats
        real[:item_count] = weight != 0
        batches = micro_batches((items, weight), micro_batch=sizes or (pad_to,), pad_to=pad_to, device=device)
        diagnostics = Diagnostics(real, parts)

        def add_gradient(start: int, size: int) -> None:
            (batch, factor), rows, shapes = next(batches), slice(start, start + size), (size, *row_shapes)
            with self._count_flops(shapes):
                result = loss_fn(batch)
                losses, info = result if isinstance(result, tuple) else (result, ())
                if losses.shape != (size,):
                    raise ValueError(
                        f"update: loss_fn returned shape {list(losses.shape)}, expected [{size}], one loss per item"
                    )
                loss = (losses * factor * real[rows]).sum() / total
                (loss * self.scale).backward()
            diagnostics.add(info, rows, loss, self.flops[shapes])

        starts = itertools.accumulate(passes, initial=0)
        return [partial(add_gradient, start, size) for start, size in zip(starts, passes, strict=False)], diagnostics

    def backward(self, losses: Sequence[Callable[[], Tensor]]) -> None:
        """Add the gradients of a sum of losses over all ranks, for custom training loops; then call `step`.

        Gradients are reduced as in `update`: with grad_sync="last", only in the backward pass of the last loss. Each loss
        is a function that runs a forward pass and returns a scalar. Every rank passes equally many.
        """
        self._run_passes([lambda loss=loss: (loss() * self.scale).backward() for loss in losses])  # type: ignore[misc]

    def _run_passes(self, passes: Sequence[Callable[[], None]], *, last: bool = True) -> None:
        """Run forward and backward passes; with `last`, the final one reduces gradients."""
        self._check_onloaded()
        with self.sharded.train():
            for i, run in enumerate(count_parts("passes", passes, 1, len(passes), unit=""), start=1):
                self.sharded.set_last(last and i == len(passes))  # whether it reduces gradients
                self.sharded.last_backward.begin(last and i == len(passes))  # whether blocks are freed behind it
                run()
        self.sharded.last_backward.end()

    @collective
    def step(self) -> UpdateInfo:
        """Take an optimizer step with the gradients that `backward` added, and clear them."""
        self._check_onloaded()
        norm = self._unscale_gradients()
        return self._apply_step(Numbers(math.nan, 0, {}, {}, None, ()), grad_norm=float(norm), norm=norm)

    def _unscale_gradients(self) -> Tensor:
        """Divide the gradients by the loss scale, and return their norm over all parameters and ranks."""
        self.sharded.reshard()  # gives the parameters their gradients
        for parameter in self.trainable.values() if self.scale != 1 else ():
            if parameter.grad is not None:
                local(parameter.grad).div_(self.scale)
        norm = get_total_norm([p.grad for p in self.trainable.values() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def _count_flops(self, shapes: tuple[Any, ...]) -> Iterator[None]:
        """Count the FLOPs of the first micro-batch of each shape; the others have the same.

        A compiled block runs uncompiled for this, and rounds differently. So the counts are saved: a resumed run then uses
        the same programs as an uninterrupted one.
        """
        if shapes in self.flops:
            yield
            return
        # Compiled blocks are counted in eager mode, because the counter cannot see compiled code.
        with FlopCounter() as counter, torch.compiler.set_stance("force_eager" if self.compiles else "default"):
            yield
        self.flops[shapes] = counter.model

    def _apply_step(self, numbers: Numbers, *, grad_norm: float, norm: Tensor) -> UpdateInfo:
        """Step the optimizer if the gradient is finite. `norm` clips on the device; `grad_norm` is its value on the host."""
        lr, skip = self.config.lr * self.lr_factor(self.updates), not math.isfinite(grad_norm)
        self.stepping = True
        if skip:
            self.skipped += 1
            self.skipped_in_a_row += self.scale == 1  # otherwise the scale may be the cause
        else:
            problem = None if self._warned else frozen_by_eps(self.config, grad_norm, self.trainable.values(), self.updates)
            if problem is not None and self.world.is_main:
                warnings.warn(problem, stacklevel=3)
            self._warned = self._warned or problem is not None
            set_lr(self.optimizer, lr)
            self._rule.apply(self.optimizer, norm, max_norm=self.config.max_grad_norm, update=self.updates)
            self.skipped_in_a_row = 0
            self._update_average()
        self.optimizer.zero_grad()
        self._adapt_scale(overflows=skip)
        self.updates += 1
        self.stepping = False
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise RunError(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row (up to update {self.updates}): "
                "lower `optimizer.lr`, or look at the reward and the last samples"
            )
        return UpdateInfo(grad_norm=grad_norm, lr=lr, skipped=skip, flops=0, **numbers._asdict())

    def _adapt_scale(self, *, overflows: bool) -> None:
        """Halve the loss scale, to 1 at least, after an overflow; double it after `GROWTH_INTERVAL` steps without one."""
        self.steady = 0 if overflows else self.steady + 1
        if self._scales_loss and overflows:
            self.scale = max(self.scale / 2, 1.0)
            if self.world.is_main:
                message = f"update {self.updates + 1}: the gradient overflowed, so its step is skipped; the loss scale is"
                warnings.warn(f"{message} {self.scale:g} now", stacklevel=4)
        elif self._scales_loss and self.steady == GROWTH_INTERVAL:
            self.scale, self.steady = 2 * self.scale, 0

    def _update_average(self) -> None:
        """Update the moving average after a step, if there is one."""
        if self.average and (self.updates + 1) % self.config.ema_interval == 0:
            decay = self.config.ema_decay
            decay = ema.warm_up_decay(decay, self.updates) if self.config.ema_warmup else decay
            with torch.no_grad():
                self.average = ema.update(
                    self.average, self._list_shards(torch.float32), decay**self.config.ema_repeats
                )  # equals this many updates

    def _check_optimizer(self) -> None:
        """Raise UsageError if the optimizer does not support the dtype of the masters."""
        names = " or ".join(name for name, row in OPTIMIZERS.items() if row.elementwise)
        if self.sharding.masters != "float32" and not self._rule.elementwise:
            hint = f"`engine.masters` is {self.sharding.masters}, whose steps are rounded value by value"
            raise UsageError("optimizer.name", self.config.name, names, hint)

    @contextmanager
    def inference(self, *, average: bool = False) -> Iterator[nn.Module]:
        """Yield the module for forward passes without gradient; its parameters are gathered once for all of them.

        Args:
            average: use the moving average, if there is one, instead of the weights.
        """
        weights: dict[str, Tensor] = {}
        if average and self.average:
            self._check_onloaded()
            self.sharded.reshard()  # the average is written to the shards
            weights = ema.init(self._list_shards())
            self._write_shards(self.average)
        try:
            with self.sharded.inference(keep=self._keeps_gathered and not weights) as module:
                yield module
        finally:
            if weights:
                self._write_shards(weights)

    @contextmanager
    def gathered_once(self) -> Iterator[None]:
        """Within the context, gather the parameters once, for inference passes and the update after them.

        With comm="keep", parameters that `inference` gathers stay until the update's last backward pass or the end of the
        context. Shards must not be written in between. With comm="reshard" it has no effect.
        """
        before, self._keeps_gathered = self._keeps_gathered, self.sharding.comm == "keep"
        try:
            yield
        finally:
            self._keeps_gathered = before
            self.sharded.reshard()

    def offload(self, *, parameters: bool = True) -> None:
        """Move this rank's optimizer state, average, gradients and parameters to the host, until `onload`.

        With parameters=False they stay on the device, and the module can still sample.
        """
        moments = [tensor for name in self.trainable for tensor in self._list_moments(name).values()]
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        self.host.offload(local(tensor) for tensor in [*moments, *gradients, *self.average.values()])
        if parameters:
            self.sharded.offload()

    def onload(self) -> None:
        """Move everything back to the device, bit-identical."""
        self.sharded.onload()
        self.host.onload()

    def _check_onloaded(self) -> None:
        self.sharded.host.check_onloaded()
        self.host.check_onloaded()

    @collective
    def weights(
        self, *, average: bool = True, adapter: str | None = None, merge: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor on the CPU) as `gather_weights` does.

        With `average` they are the moving average's, if there is one.
        """
        averaged = self.read_average() if average else None
        return gather_weights(self.module, average=averaged, adapter=adapter, merge=merge, dtype=dtype)

    def read_average(self) -> dict[str, Tensor]:
        """Return the moving average as sharded tensors, by the names of the parameters; empty if there is none."""
        self._check_onloaded()
        return {name: shard_like(self.trainable[name], shard) for name, shard in self.average.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint as a flat dict of (sharded) tensors: weights, optimizer state, average.

        The tensors are not copies; the next update may replace those of the average.
        """
        self._check_onloaded()
        self.sharded.reshard()
        state: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            state[f"weight.{name}"] = parameter.detach()
            state.update((f"{key}.{name}", tensor) for key, tensor in self._list_moments(name).items())
            if name in self.average:
                state[f"average.{name}"] = shard_like(parameter, self.average[name])
        for name, parameter in self.carried.items():
            state[f"weight.{name}"] = parameter.detach()
        return state

    def counters(self) -> dict[str, Any]:
        """Return the counters that belong to `state`, for JSON; with compiled blocks every rank must call it.

        They are the number of updates, of skipped ones and of those skipped since the last step, the loss scale, and the
        FLOPs counted per rank.
        """
        names = ("updates", "skipped", "skipped_in_a_row", *(("scale", "steady") if self._scales_loss else ()))
        counters = {name: getattr(self, name) for name in names}
        return counters | ({"flops": self.world.gather_items([*self.flops.items()])} if self.compiles else {})

    def restore(self, state: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Restore a state and its counters, as returned by `state` and `counters` on any number of ranks.

        Values are copied.
        """
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.scale, self.steady = counters.get("scale", self.scale), counters.get("steady", 0)
        counted = counters.get("flops", [])
        if self.compiles and len(counted) == self.world.size:
            self.flops = {(size, *map(tuple, shapes)): flops for (size, *shapes), flops in counted[self.world.rank]}
        state_here = self.state()
        with torch.no_grad():
            for name, tensor in state_here.items():
                local(tensor).copy_(local(state[name]))
            for parameter in self.trainable.values():
                if "step" in self.optimizer.state[parameter]:  # a skipped update is no step of the optimizer
                    self.optimizer.state[parameter]["step"].fill_(self.updates - self.skipped)

    def _list_moments(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a parameter's optimizer state, without the step count."""
        parameter = self.trainable[name]
        return list_saved(self.optimizer.state[parameter], self._rule.buffers(tuple(parameter.shape), self.config))

    def _list_shards(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return this rank's shards of the trained parameters, cast to `dtype` if it is set."""
        shards = {name: local(parameter).detach() for name, parameter in self.trainable.items()}
        return shards if dtype is None else {name: shard.to(dtype) for name, shard in shards.items()}

    def _write_shards(self, shards: dict[str, Tensor]) -> None:
        for name, shard in self._list_shards().items():
            shard.copy_(shards[name])
