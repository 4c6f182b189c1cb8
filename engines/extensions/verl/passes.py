"""Forward and backward passes over the items of a batch, in micro-batches, with verl's loss function."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.module import ShardedModule
from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.verl.algorithms import Algorithm
from fluvial.engines.extensions.verl.batch import ItemBatch, unflatten_steps
from fluvial.engines.extensions.verl.denoiser import Denoiser
from fluvial.models.host_values import fresh_copy

# loss_function(model_output=..., data=..., dp_group=...) -> (loss, metrics)
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class BatchPasses:
    """Passes over one batch, with the result for verl.

    A micro-batch is any slice of the items. So a forward pass may hold several steps of a sample, gradients are reduced once
    per batch, and the number of passes is ceil(B T / micro_batch).

    Args:
        batch: items of this rank, the same number on every rank.
        algorithm, denoiser, world: attributes of the engine.
        micro_batch: items per forward pass.
        loss_function: verl's loss function; None only computes outputs.
        group: verl's data-parallel group, an argument of the loss function.
        append: verl's `append_to_dict`, which gathers metrics.

    Raises:
        UsageError: the micro-batch is too small, or not a multiple of `batch.width`.
        RunError: ranks have different numbers of items.
    """

    def __init__(
        self,
        batch: ItemBatch,
        algorithm: Algorithm,
        denoiser: Denoiser,
        world: World,
        *,
        micro_batch: int,
        loss_function: LossFunction | None,
        group: Any,
        append: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.batch, self.algorithm, self.denoiser, self.world = batch, algorithm, denoiser, world
        self.micro_batch, self.loss_function, self.group, self.append = micro_batch, loss_function, group, append
        if micro_batch < 1 or micro_batch % batch.width:
            multiple = f"a multiple of {batch.width}" if batch.width > 1 else "at least 1"
            raise UsageError(f"micro_batch_size_per_gpu is {micro_batch}, expected {multiple}")
        if len(counts := set(world.gather_items(batch.size))) > 1:
            raise RunError(f"ranks have {min(counts)} to {max(counts)} items, expected as many on every rank")
        self.outputs: dict[str, list[Tensor]] = {}
        self.losses: list[Tensor] = []
        self.metrics: dict[str, Any] = {}

    def train(self, engine: Engine, configure: Callable[[nn.Module], None]) -> dict[str, Any]:
        """Add the gradients of the loss to the engine's, and return the result.

        Args:
            engine: the engine.
            configure: function that configures the module in training mode.
        """

        def compute_loss(rows: slice) -> Tensor:
            configure(engine.module)
            # verl's losses are means over the samples of a rank, and the gradient is that of the mean over the ranks.
            return self._compute_loss(engine.module, rows) / self.world.data_size

        engine.backward([partial(compute_loss, rows) for rows in self._slice_items()])
        return self._collect_result()

    def infer(self, module: ShardedModule) -> dict[str, Any]:
        """Return the result of forward passes without gradient."""
        with module.inference() as network:
            for rows in self._slice_items():
                self._compute_loss(network, rows)
        return self._collect_result()

    def _slice_items(self) -> Iterator[slice]:
        for start in range(0, self.batch.size, self.micro_batch):
            yield slice(start, min(start + self.micro_batch, self.batch.size))

    def _compute_loss(self, module: nn.Module, rows: slice) -> Tensor:
        """Return the loss of a micro-batch, a scalar; 0 without a loss function."""
        device = self.world.device
        items = fresh_copy({name: tensor[rows] for name, tensor in self.batch.items.items()}, device)
        outputs = self.algorithm.compute_outputs(self.denoiser, module, items, self.batch.cond)
        for name, value in outputs.items():
            self.outputs.setdefault(name, []).append(value.detach())
        total = torch.zeros((), device=device)
        if self.loss_function is None:
            return total
        for part in self._split_steps(rows):
            part_outputs = {name: value[part.start - rows.start : part.stop - rows.start] for name, value in outputs.items()}
            total = total + self._compute_step_loss(part_outputs, self._build_data(part, device))
        return total

    def _split_steps(self, rows: slice) -> Iterator[slice]:
        """Split a micro-batch at the ends of steps, because a loss function may average over one step."""
        start = rows.start
        while start < rows.stop:
            stop = min((start // self.batch.samples + 1) * self.batch.samples, rows.stop)
            yield slice(start, stop)
            start = stop

    def _compute_step_loss(self, outputs: dict[str, Tensor], data: Any) -> Tensor:
        """Call verl's loss function on items of one step, check the result, and gather its metrics."""
        assert self.loss_function is not None
        result = self.loss_function(model_output=outputs, data=data, dp_group=self.group)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(f"the loss function returned a {type(result).__name__}, expected a loss and its metrics")
        loss, metrics = result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss function returned a loss of {shape}, expected a tensor with one number")
        self.losses.append(loss.detach().reshape(()))
        self.append(self.metrics, metrics)
        return loss.reshape(())

    def _build_data(self, rows: slice, device: torch.device) -> Any:
        """Build the loss function's data of some items.

        It divides its mean by `gradient_accumulation_steps`, the ratio of all items to these.
        """
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorData, NonTensorStack

        size, count = rows.stop - rows.start, self.batch.size
        numbers = {name: tensor[rows].to(device, non_blocking=True) for name, tensor in self.batch.numbers.items()}
        data: Any = TensorDict(numbers, batch_size=[size])
        data["gradient_accumulation_steps"] = NonTensorData(count // size if count % size == 0 else count / size)
        data["sp_size"] = NonTensorData(1)  # the engine sums over ranks that share a sample
        if self.batch.uid is not None:
            data["uid"] = NonTensorStack.from_list([NonTensorData(each) for each in self.batch.uid[rows]])
        return data

    def _collect_result(self) -> dict[str, Any]:
        """Return outputs `[B, T, ...]`, the losses, whose sum is the batch's loss, and metrics."""
        outputs = {name: unflatten_steps(torch.cat(values), self.batch) for name, values in self.outputs.items()}
        losses = torch.stack(self.losses).tolist() if self.losses else []
        return {"model_output": outputs, "loss": losses, "metrics": self.metrics}
