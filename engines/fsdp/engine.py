"""The engine: a sharded module and its optimizer, and one update over a flat set of weighted items.

It knows modules, parameters, optimizer, devices and ranks. What an item is (a (sample, step) pair, a noised image)
and what its loss means come in as a pytree and a function.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from optree import PyTree
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fluvial.core import ema
from fluvial.core.checks import trusted_values
from fluvial.engines.errors import RunError
from fluvial.engines.fsdp import export
from fluvial.engines.fsdp.flops import FlopCounter
from fluvial.engines.fsdp.gradient_sync import LastBackward
from fluvial.engines.fsdp.module import ShardedModule
from fluvial.engines.fsdp.offload import HostOffload
from fluvial.engines.fsdp.optimizer import OptimizerConfig, adamw, lr_factor
from fluvial.engines.fsdp.parallelize import EngineConfig
from fluvial.engines.fsdp.world import World
from fluvial.models.lora import is_adapter
from fluvial.models.protocol import Weights

# loss_fn(items) -> (loss [b], diagnostics: a NamedTuple of [b] tensors without gradient)
LossFn = Callable[[PyTree[Tensor]], tuple[Tensor, Any]]


class UpdateInfo(NamedTuple):
    """What one update did, read back from the device once."""

    loss: float  # weighted sum over items, over the global count
    grad_norm: float  # before clipping
    lr: float
    skipped: bool
    mean: dict[str, float]  # of each diagnostic, over the items that were computed
    max_abs: dict[str, float]
    items: int  # computed, over all ranks
    flops: int  # of the model's forward and backward passes on this rank, without what checkpointing computed again


class Engine:
    """A module sharded with FSDP2, its optimizer, its learning-rate schedule and its moving average.

    Memory held a parameter is what `Sharded` holds, and for trainable ones, sharded over the R ranks of one replica, 8 bytes
    / R for AdamW's moments, 4 / R for the average if there is one, and during an update 4 / R for the sharded gradient; on
    the CPU with offload="always". Unsharded an update holds, in the dtype of the reduction, with grad_sync="last" all
    gradients, else those of a block; `fluvial plan` adds it up.

    Args:
        module: as `Sharded` takes it; parameters that do not require gradients stay frozen.
        blocks: the repeated blocks of the module; each is one unit of communication.
        config: of the optimizer.
        world: of the world.
        updates: planned in all, for the learning-rate schedule.
        sharding: how the module lies on them.
        weights: folder that parameters on the meta device are read from.

    Raises:
        UsageError: the configuration does not fit the module or the ranks.
        ValueError: the module has nothing to train.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        config: OptimizerConfig,
        world: World,
        *,
        updates: int,
        sharding: EngineConfig | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.sharded = ShardedModule(module, blocks, world, sharding or EngineConfig(), weights=weights)
        self.config, self.world, self.sharding = config, self.sharded.world, self.sharded.config
        self.module = self.sharded.module
        self.last_use = LastBackward(self.sharded.units, reshard=self.sharding.comm == "reshard")
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise ValueError("Engine: the module has no parameter that requires a gradient")
        # Adapters that are not trained, an old policy's say, are in no base weights, so a resumed run must find them again.
        self.carried = {name: p for name, p in self.module.named_parameters() if is_adapter(name) and not p.requires_grad}
        self.optimizer = adamw(self.trainable.values(), config)
        self.lr_factor = lr_factor(self.optimizer, config, updates=updates)
        self.average = ema.init(self._local()) if config.ema_decay else {}
        self.updates = self.skipped = self.skipped_in_a_row = 0
        self.parking = HostOffload(self.world.device)  # of the optimizer state, the average and gradients
        self.flops: dict[int, int] = {}  # of the model, by the size of the micro-batch

    def update(
        self, items: PyTree[Tensor], weight: Tensor, loss_fn: LossFn, *, count: float, micro_batch: int, pad_to: int
    ) -> UpdateInfo:
        """Take one optimizer step on sum(weight * loss_fn(items)) / count, the sum over all items of all ranks.

        Items are worked through in micro-batches, whose size decides the memory and nothing else.

        Args:
            items: a pytree of tensors `[P, ...]`, this rank's part; P >= 1 may differ between ranks.
            weight: `[P]`.
            loss_fn: the loss of a micro-batch of items, an item each, and diagnostics.
            count: what the sum is divided by, the same on all ranks.
            micro_batch: items a forward and backward pass.
            pad_to: the largest P over the ranks, the same on all ranks. Each runs as many micro-batches as it takes, filled
                up with items of weight 0, so that collectives match.

        Raises:
            RunError: the gradient was not finite in `max_skipped` updates in a row.
        """
        self._check_onloaded()
        device, held, n = self.world.device, weight.shape[0], math.ceil(pad_to / micro_batch)
        real = torch.zeros(n * micro_batch, device=device)
        real[:held] = 1
        batches = micro_batches((items, weight), micro_batch=micro_batch, pad_to=pad_to, device=device)
        loss_sum, sums, peaks, names = torch.zeros((), device=device), None, None, ()
        for i, (batch, factor) in enumerate(batches):
            counted = real[i * micro_batch : (i + 1) * micro_batch]
            self._set_last(i == n - 1)
            with self.sharded.train(), trusted_values(), self._counted(micro_batch):
                loss, info = loss_fn(batch)
                total = (loss * factor * counted).sum() / count
                total.backward()
            names, leaves = info._fields, torch.stack([leaf.detach() * counted for leaf in info])
            loss_sum = loss_sum + total.detach()
            sums = leaves.sum(1) if sums is None else sums + leaves.sum(1)
            peak = leaves.abs().amax(1)
            peaks = peak if peaks is None else torch.maximum(peaks, peak)
        self.last_use.end()
        assert sums is not None
        assert peaks is not None
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        local = torch.cat([torch.stack([loss_sum, real.sum()]), sums, peaks])[None]
        # The one read-back of the update.
        table = torch.cat([self.world.gather_data(local), norm.to(local).expand(1, local.shape[1])]).tolist()
        info = self._step(names, ranks=table[:-1], grad_norm=table[-1][0], norm=norm)
        return info._replace(flops=n * self.flops[micro_batch])

    @contextmanager
    def _counted(self, micro_batch: int) -> Iterator[None]:
        """Count the FLOPs of the first micro-batch of a size; those of the others are the same."""
        if micro_batch in self.flops:
            yield
            return
        # A compiled block is counted as it was written: what the compiler makes of it, no counter sees.
        with FlopCounter() as counter, torch.compiler.set_stance("force_eager" if self.sharding.compile else "default"):
            yield
        self.flops[micro_batch] = counter.model

    def _step(self, names: tuple[str, ...], *, ranks: list[list[float]], grad_norm: float, norm: Tensor) -> UpdateInfo:
        """Step the optimizer if the gradient is finite, and put the ranks' numbers together."""
        lr, skip = self.config.lr * self.lr_factor(self.updates), not math.isfinite(grad_norm)
        if skip:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            clip_grads_with_norm_(self.trainable.values(), self.config.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.skipped_in_a_row = 0
            if self.average:
                decay = ema.warmed_decay(self.config.ema_decay, self.updates)
                with torch.no_grad():
                    self.average = ema.update(self.average, self._local(), decay)
        self.optimizer.zero_grad()
        self.updates += 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise RunError(
                f"the gradient was not finite in {self.skipped_in_a_row} updates in a row (up to update {self.updates}): "
                "lower the learning rate, or look at the reward and the last samples"
            )
        loss, items = (sum(row[i] for row in ranks) for i in (0, 1))
        columns = {name: [row[2 + k] for row in ranks] for k, name in enumerate(names)}
        peaks = {name: [row[2 + len(names) + k] for row in ranks] for k, name in enumerate(names)}
        return UpdateInfo(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            skipped=skip,
            mean={name: sum(values) / max(items, 1) for name, values in columns.items()},
            max_abs={name: _max(values) for name, values in peaks.items()},
            items=int(items),
            flops=0,
        )

    @contextmanager
    def inference(self, *, average: bool = False) -> Iterator[nn.Module]:
        """Give the module for forward passes without gradient, its parameters gathered once for all of them.

        Args:
            average: with the moving average in place of the weights, if there is one.
        """
        swap = average and bool(self.average)
        if swap:
            self._check_onloaded()
        kept = ema.init(self._local()) if swap else {}
        if swap:
            self._write_local(self.average)
        try:
            with self.sharded.inference() as module:
                yield module
        finally:
            if swap:
                self._write_local(kept)

    def offload(self, *, parameters: bool = True) -> None:
        """Move this rank's optimizer state, average, gradients and parameters to the host, until `onload`.

        Memory: the host holds as much, pinned for a GPU; the device keeps nothing of it.

        Args:
            parameters: if false, the parameters stay, so that samples can still be made.
        """
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values() if tensor.ndim]
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        self.parking.park(_local(tensor) for tensor in [*moments, *gradients, *self.average.values()])
        if parameters:
            self.sharded.offload()

    def onload(self) -> None:
        """Bring back what was offloaded, to the bit."""
        self.sharded.onload()
        self.parking.restore()

    def _check_onloaded(self) -> None:
        self.sharded.parking.check_restored()
        self.parking.check_restored()

    def weights(
        self, *, average: bool = True, adapter: str | None = None, merge: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor on the CPU), one at a time, as `export.weights` does; every rank must take part.

        Args:
            average: take the moving average where there is one.
            adapter, merge, dtype: which tensors, and as what.
        """
        averaged = self.averaged() if average else None
        return export.weights(self.module, average=averaged, adapter=adapter, merge=merge, dtype=dtype)

    def averaged(self) -> dict[str, Tensor]:
        """Return the moving average as sharded tensors, by the names of the parameters; empty if there is none."""
        self._check_onloaded()
        return {name: _like(self.trainable[name], shard) for name, shard in self.average.items()}

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run must find again, as a flat dict of (sharded) tensors: weights, moments, average."""
        self._check_onloaded()
        state: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            assert isinstance(parameter, DTensor)
            moments = self.optimizer.state.get(parameter) or {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            state[f"weight.{name}"] = parameter.detach()
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
            if name in self.average:
                state[f"average.{name}"] = _like(parameter, self.average[name])
        for name, parameter in self.carried.items():
            state[f"weight.{name}"] = parameter.detach()
        return state

    def counters(self) -> dict[str, int]:
        """Return the numbers that go with `state`: updates, skipped updates, optimizer steps."""
        return {"updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def restore(self, state: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Take over a state and its counters, as `state` and `counters` gave them (on any number of ranks).

        Moments and average become the engine's own; weights are copied.
        """
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        steps = torch.tensor(float(self.updates - self.skipped))
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(state[f"weight.{name}"])
                self.optimizer.state[parameter] = {
                    # Where the parameter is: AdamW's fused form takes all it works on from one device.
                    "step": steps.to(_local(parameter).device, copy=True),
                    "exp_avg": state[f"exp_avg.{name}"],
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"],
                }
                if name in self.average:
                    averaged = state[f"average.{name}"]
                    assert isinstance(averaged, DTensor)
                    self.average[name] = averaged.to_local()
            for name, parameter in self.carried.items():
                parameter.copy_(state[f"weight.{name}"])

    def _set_last(self, last: bool) -> None:
        """Set whether the next backward pass is the update's last: then gradients are reduced and parameters freed."""
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last or self.sharding.grad_sync == "every")
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self.sharding.comm == "reshard")
        self.last_use.begin(last)

    def _local(self) -> dict[str, Tensor]:
        """Return this rank's shards of the trainable parameters."""
        return self.sharded.shards(trainable=True)

    def _write_local(self, shards: dict[str, Tensor]) -> None:
        for name, shard in self._local().items():
            shard.copy_(shards[name])


def _like(parameter: nn.Parameter, shard: Tensor) -> DTensor:
    """Return this rank's shard as part of a tensor laid out as `parameter`."""
    assert isinstance(parameter, DTensor)
    # As FSDP2 makes its own: from_local would move a shard that is kept on the CPU to the mesh's device.
    return DTensor(shard, parameter._spec, requires_grad=False)


def micro_batches(items: PyTree[Tensor], *, micro_batch: int, pad_to: int, device: torch.device) -> Iterator[PyTree[Tensor]]:
    """Yield the items of a pytree, `[P, ...]`, in ceil(pad_to / micro_batch) micro-batches on a device.

    All are whole: what is missing repeats items from the first on. Micro-batches without repeats are views.
    """
    first = optree.tree_leaves(items)[0]
    held = len(first)
    for start in range(0, pad_to, micro_batch):
        stop = start + micro_batch
        rows = slice(start, stop) if stop <= held else torch.arange(start, stop, device=first.device) % held
        yield optree.tree_map(lambda tensor, rows=rows: tensor[rows].to(device, non_blocking=True), items)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that may be sharded; it shares its storage."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _max(values: list[float]) -> float:
    """Return the largest of values, NaN if one of them is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)
