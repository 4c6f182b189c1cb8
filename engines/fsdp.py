"""The engine: a sharded module and its optimizer, and one update over a flat set of weighted items.

It knows modules, parameters, optimizer, devices and ranks. What an item is (a (sample, step) pair, a noised picture)
and what its loss means come in as a pytree and a function.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import optree
import torch
from diffusers.optimization import get_scheduler
from optree import PyTree
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fluvial.core import ema
from fluvial.core.checks import check_number, trusted_values
from fluvial.engines.distributed import World
from fluvial.engines.errors import RunError

# loss_fn(items) -> (loss [b], diagnostics: a NamedTuple of [b] tensors without gradient)
LossFn = Callable[[PyTree[Tensor]], tuple[Tensor, Any]]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, gradient clipping and the average of weights.

    Args:
        lr: peak learning rate.
        betas: decay of AdamW's first and second moment.
        weight_decay: of AdamW.
        schedule: "constant" or "cosine" (to 0 at the last update), after the warm-up.
        warmup: updates over which the learning rate rises linearly from 0.
        max_grad_norm: the gradient's norm over all parameters and ranks is clipped to this.
        ema_decay: decay of the moving average of weights, which evaluation and export use; 0 uses the weights as they are.
        max_skipped: stop after this many updates in a row whose gradient was not finite.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        check_number("optimizer", "lr", self.lr, low=0)
        check_number("optimizer", "weight_decay", self.weight_decay, low=0)
        check_number("optimizer", "warmup", self.warmup, low=0)
        check_number("optimizer", "max_grad_norm", self.max_grad_norm, low=1e-12)
        check_number("optimizer", "max_skipped", self.max_skipped, low=1)
        for beta in (*self.betas, self.ema_decay):
            check_number("optimizer", "betas and ema_decay", beta, low=0, high=1)
            if beta == 1:
                raise ValueError("optimizer: a decay of 1 never takes in anything new, expected below 1")


@dataclass(frozen=True)
class EngineConfig:
    """How the module lies on the processes, and what is given up for memory.

    Args:
        comm: "keep" gathers parameters once an update and keeps them unsharded until its last backward pass; "reshard"
            frees them after each use and gathers them again.
        grad_sync: "last" reduces gradients once an update, and holds them unsharded until then; "every" reduces them after
            each micro-batch, for full fine-tuning whose unsharded gradients do not fit.
        replicas: copies of the sharded module, each on its share of the ranks (hybrid sharding); 1 shards over all ranks.
        compute: dtype of the gathered parameters and of what is computed with them: float32, bfloat16, or auto (bfloat16 on
            CUDA). The master weights are float32, and numbers a sample (noise levels, timesteps) stay as they are.
        reduce: dtype that gradients are reduced in.
        checkpointing: keep a block's inputs alone for the backward pass, and compute the rest again.
        offload: keep shards of parameters, gradients and optimizer state on the CPU, and move what is used.
    """

    comm: Literal["keep", "reshard"] = "keep"
    grad_sync: Literal["last", "every"] = "last"
    replicas: int = 1
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    reduce: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        check_number("engine", "replicas", self.replicas, low=1)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype that is computed in on a device."""
        if self.compute == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.compute]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UpdateInfo(NamedTuple):
    """What one update did, read back from the device once."""

    loss: float  # weighted sum over items, over the global count
    grad_norm: float  # before clipping
    lr: float
    skipped: bool
    mean: dict[str, float]  # of each diagnostic, over the items that were computed
    max_abs: dict[str, float]
    items: int  # computed, over all ranks


class Engine:
    """A module sharded with FSDP2, its optimizer, its learning-rate schedule and its moving average.

    Memory held a parameter, sharded over R ranks (of one replica): 4 bytes / R for the fp32 master, and for trainable ones
    8 / R for AdamW's moments, 4 / R for the average if there is one, and during an update 4 / R for the sharded gradient; on
    the CPU with offload. Unsharded an update holds, in the dtype of the computation, with comm="keep" all parameters, else
    those of two blocks; and with grad_sync="last" all gradients, else those of a block.

    Args:
        module: on the CPU, with its weights; parameters that do not require gradients stay frozen.
        blocks: the repeated blocks of the module; each is one unit of communication.
        config: of the optimizer.
        world: of the processes.
        updates: planned in all, for the learning-rate schedule.
        sharding: how the module lies on them.

    Raises:
        UsageError: the ranks are no multiple of the replicas.
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
    ) -> None:
        self.config, self.world, self.sharding = config, world, sharding or EngineConfig()
        if self.sharding.offload:  # parameters stay on the CPU
            for submodule in module.modules():
                for name, buffer in submodule.named_buffers(recurse=False):
                    setattr(submodule, name, buffer.to(world.device))
        self.module = module if self.sharding.offload else module.to(world.device)
        self._shard(blocks)
        for sharded in self._units():
            # The engine divides by one global count itself; a mean over ranks would weigh uneven ranks equally.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not self.trainable:
            raise ValueError("Engine: the module has no parameter that requires a gradient")
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        # Only the function of the number of updates is taken: without state there is nothing to resume.
        self.lr_factor: Callable[[int], float] = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else "cosine",
            self.optimizer,
            num_warmup_steps=config.warmup,
            num_training_steps=updates,
        ).lr_lambdas[0]
        self.average = ema.init(self._local()) if config.ema_decay else {}
        self.updates = self.skipped = self.skipped_in_a_row = 0

    def _shard(self, blocks: Sequence[nn.Module]) -> None:
        """Make each block, and the module with what is left, a unit of communication."""
        sharding, mesh = self.sharding, self.world.hybrid_mesh(self.sharding.replicas)
        dtype = sharding.compute_dtype(self.world.device)
        cast_samples(self.module, dtype)
        if sharding.checkpointing:
            for block in blocks:
                checkpoint(block)  # in place: names of parameters stay as they are
        for unit in [*blocks, self.module]:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=sharding.comm == "reshard",
                # The root would cast timesteps too, which have more digits than bfloat16 holds; the hook does not.
                mp_policy=MixedPrecisionPolicy(dtype, DTYPES[sharding.reduce], cast_forward_inputs=unit is not self.module),
                offload_policy=CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
                if sharding.offload
                else OffloadPolicy(),
            )

    def update(
        self, items: PyTree[Tensor], weight: Tensor, loss_fn: LossFn, *, count: int, micro_batch: int, pad_to: int
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
        items, weight, real = _padded(items, weight, pad_to=pad_to, micro_batch=micro_batch)
        n = weight.shape[0] // micro_batch
        loss_sum, sums, peaks, names = weight.new_zeros(()), None, None, ()
        for i in range(n):
            rows = slice(i * micro_batch, (i + 1) * micro_batch)
            self._set_last(i == n - 1)
            with trusted_values():
                loss, info = loss_fn(optree.tree_map(lambda tensor, rows=rows: tensor[rows], items))
            total = (loss * weight[rows]).sum() / count
            total.backward()
            names, leaves = info._fields, torch.stack([leaf.detach() * real[rows] for leaf in info])
            loss_sum = loss_sum + total.detach()
            sums = leaves.sum(1) if sums is None else sums + leaves.sum(1)
            peak = leaves.abs().amax(1)
            peaks = peak if peaks is None else torch.maximum(peaks, peak)
        assert sums is not None
        assert peaks is not None
        gradients = [p.grad for p in self.trainable.values() if p.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        local = torch.cat([torch.stack([loss_sum, real.sum()]), sums, peaks])[None]
        # The one read-back of the update.
        table = torch.cat([self.world.gather(local), norm.to(local).expand(1, local.shape[1])]).tolist()
        return self._step(names, ranks=table[:-1], grad_norm=table[-1][0], norm=norm)

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
        )

    @contextmanager
    def inference(self, *, average: bool = False) -> Iterator[nn.Module]:
        """Give the module for forward passes without gradient, its parameters gathered once for all of them.

        Args:
            average: with the moving average in place of the weights, if there is one.
        """
        swap = average and bool(self.average)
        kept = ema.init(self._local()) if swap else {}
        with torch.no_grad():
            if swap:
                self._write_local(self.average)
            for unit in self._units():
                unit.set_reshard_after_forward(False)
            try:
                yield self.module
            finally:
                for unit in self._units():
                    unit.reshard()
                    unit.set_reshard_after_forward(self.sharding.comm == "reshard")
                if swap:
                    self._write_local(kept)

    def weights(self, *, average: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor on the CPU) of every parameter and buffer, one at a time; every rank must take part.

        Args:
            average: take the moving average where there is one.
        """
        for name, tensor in self.module.state_dict().items():
            if average and name in self.average:
                trained = self.trainable[name]
                assert isinstance(trained, DTensor)
                tensor = _like(trained, self.average[name])
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run must find again, as a flat dict of (sharded) tensors: weights, moments, average."""
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
        return state

    def counters(self) -> dict[str, int]:
        """Return the numbers that go with `state`: updates, skipped updates, optimizer steps."""
        return {"updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def restore(self, state: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Take over a state and its counters, as `state` and `counters` gave them (on any number of ranks)."""
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        steps = torch.tensor(float(self.updates - self.skipped))
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(state[f"weight.{name}"])
                self.optimizer.state[parameter] = {
                    "step": steps.clone(),
                    "exp_avg": state[f"exp_avg.{name}"].clone(),
                    "exp_avg_sq": state[f"exp_avg_sq.{name}"].clone(),
                }
                if name in self.average:
                    averaged = state[f"average.{name}"]
                    assert isinstance(averaged, DTensor)
                    self.average[name] = averaged.to_local().clone()

    def _units(self) -> list[FSDPModule]:
        return [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]

    def _set_last(self, last: bool) -> None:
        """Set whether the next backward pass is the update's last: then gradients are reduced and parameters freed."""
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last or self.sharding.grad_sync == "every")
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self.sharding.comm == "reshard")

    def _local(self) -> dict[str, Tensor]:
        """Return this rank's shards of the trainable parameters."""
        shards = {}
        for name, parameter in self.trainable.items():
            assert isinstance(parameter, DTensor)
            shards[name] = parameter.to_local().detach()
        return shards

    def _write_local(self, shards: dict[str, Tensor]) -> None:
        for name, shard in self._local().items():
            shard.copy_(shards[name])


def cast_samples(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module take its floating-point inputs in the dtype that it computes in, except numbers a sample."""

    def cast(value: Any) -> Any:
        samples = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        return value.to(dtype) if samples else value

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return optree.tree_map(cast, args), optree.tree_map(cast, kwargs)

    if dtype != torch.float32:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def forward_only(module: nn.Module, world: World, sharding: EngineConfig) -> nn.Module:
    """Make a module that is not trained compute what an engine's module with the same weights computes, in place.

    Memory held a parameter: 2 or 4 bytes on every rank, by `sharding.compute`; it is not sharded.
    """
    dtype = sharding.compute_dtype(world.device)
    module.to(world.device).requires_grad_(False)
    for parameter in module.parameters():  # and not buffers, which stay in float32 in a sharded module too
        parameter.data = parameter.data.to(dtype)
    cast_samples(module, dtype)
    return module


def _like(parameter: DTensor, shard: Tensor) -> DTensor:
    """Return this rank's shard as part of a tensor laid out as `parameter`."""
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _padded(
    items: PyTree[Tensor], weight: Tensor, *, pad_to: int, micro_batch: int
) -> tuple[PyTree[Tensor], Tensor, Tensor]:
    """Fill items up with repeats of weight 0 to whole micro-batches: (items, weight, 1 where an item is real)."""
    length = math.ceil(pad_to / micro_batch) * micro_batch
    index = torch.arange(length, device=weight.device)
    real = (index < weight.shape[0]).to(weight.dtype)
    take = index % weight.shape[0]
    return optree.tree_map(lambda tensor: tensor[take], items), weight[take] * real, real


def _max(values: list[float]) -> float:
    """Return the largest of values, NaN if one of them is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)
