"""Forward and backward passes over the items of a batch, in micro-batches, with the loss function that verl hands in."""

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
from fluvial.engines.extensions.verl.batch import ItemBatch, by_sample
from fluvial.engines.extensions.verl.denoiser import Denoiser
from fluvial.models.host_values import fresh_copy

# loss_function(model_output=..., data=..., dp_group=...) -> (loss, metrics)
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class BatchPasses:
    """The passes of one batch, and what they return to verl.

    A micro-batch is any slice of the items. So a forward pass may hold several steps of a sample, gradients are reduced once
    per batch, and the number of passes is ceil(B T / micro_batch).

    Args:
        batch: items of this rank; every rank has as many.
        algorithm, denoiser, world: those of the engine.
        micro_batch: items per forward pass.
        loss_function: verl's loss function; None computes outputs alone.
        group: verl's data-parallel group, which the loss function is given.
        append: verl's `append_to_dict`, which gathers metrics.

    Raises:
        UsageError: the micro-batch is too small, or parts what belongs together.
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
            configure: function that changes the module once it is in training mode.
        """

        def loss(rows: slice) -> Tensor:
            configure(engine.module)
            # verl's losses are means over the samples of a rank, and the gradient is that of the mean over the ranks.
            return self._loss(engine.module, rows) / self.world.data_size

        engine.backward([partial(loss, rows) for rows in self._slices()])
        return self._result()

    def infer(self, module: ShardedModule) -> dict[str, Any]:
        """Return the result of forward passes without gradient."""
        with module.inference() as network:
            for rows in self._slices():
                self._loss(network, rows)
        return self._result()

    def _slices(self) -> Iterator[slice]:
        for start in range(0, self.batch.size, self.micro_batch):
            yield slice(start, min(start + self.micro_batch, self.batch.size))

    def _loss(self, module: nn.Module, rows: slice) -> Tensor:
        """Return the loss of a micro-batch, a scalar; 0 without a loss function."""
        device = self.world.device
        items = fresh_copy({name: tensor[rows] for name, tensor in self.batch.items.items()}, device)
        outputs = self.algorithm.outputs(self.denoiser, module, items, self.batch.cond)
        for name, value in outputs.items():
            self.outputs.setdefault(name, []).append(value.detach())
        total = torch.zeros((), device=device)
        if self.loss_function is None:
            return total
        for part in self._steps(rows):
            part_outputs = {name: value[part.start - rows.start : part.stop - rows.start] for name, value in outputs.items()}
            total = total + self._step_loss(part_outputs, self._data(part, device))
        return total

    def _steps(self, rows: slice) -> Iterator[slice]:
        """Cut a micro-batch where a step ends: a loss function may average over what it is given, and expects one step."""
        start = rows.start
        while start < rows.stop:
            stop = min((start // self.batch.samples + 1) * self.batch.samples, rows.stop)
            yield slice(start, stop)
            start = stop

    def _step_loss(self, outputs: dict[str, Tensor], data: Any) -> Tensor:
        """Return what verl's loss function returns for items of one step, checked, and note its metrics."""
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

    def _data(self, rows: slice, device: torch.device) -> Any:
        """Return what the loss function reads of some items.

        `gradient_accumulation_steps` is what it divides its mean by: the ratio of all items to these.
        """
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorData, NonTensorStack

        size, count = rows.stop - rows.start, self.batch.size
        numbers = {name: tensor[rows].to(device, non_blocking=True) for name, tensor in self.batch.numbers.items()}
        data: Any = TensorDict(numbers, batch_size=[size])
        data["gradient_accumulation_steps"] = NonTensorData(count // size if count % size == 0 else count / size)
        data["sp_size"] = NonTensorData(1)  # the engine itself sums over ranks that share a sample
        if self.batch.uid is not None:
            data["uid"] = NonTensorStack.from_list([NonTensorData(each) for each in self.batch.uid[rows]])
        return data

    def _result(self) -> dict[str, Any]:
        """Return outputs `[B, T, ...]`, the losses of the micro-batches, which add up to the batch's, and metrics."""
        joined = {name: by_sample(torch.cat(values), self.batch) for name, values in self.outputs.items()}
        losses = torch.stack(self.losses).tolist() if self.losses else []
        return {"model_output": joined, "loss": losses, "metrics": self.metrics}
