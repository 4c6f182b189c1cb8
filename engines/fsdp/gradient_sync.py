"""An update's last backward pass where it goes through a block more than once, as with guidance in two forward passes.

FSDP reduces a block's gradients and frees its parameters after each use of the block. If two uses share a backward pass,
what earlier micro-batches left is reduced after the first of them, the rest after the second, and parameters are gathered
once more in between.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class LastBackward:
    """Lets each unit reduce its gradients, and free its parameters, after the last of its uses in a backward pass.

    Args:
        units: of communication.
        reshard: free a unit's parameters after each use nevertheless.
    """

    def __init__(self, units: Sequence[FSDPModule], *, reshard: bool) -> None:
        self._reshard, self._last = reshard, False
        self._forwards: Counter[FSDPModule] = Counter()
        self._waiting: set[FSDPModule] = set()
        for unit in units:
            unit.register_forward_hook(self._forward)  # type: ignore[attr-defined]

    def begin(self, last: bool) -> None:
        """Begin a micro-batch, the update's last one or not."""
        self._last = last
        self._forwards.clear()

    def end(self) -> None:
        """End the update.

        Raises:
            ValueError: a forward pass with gradient had no part in the last micro-batch's loss, and gradients wait for it.
        """
        self._last = False  # backward passes outside of an update are as FSDP has them
        if self._waiting:
            self._waiting.clear()
            raise ValueError("update: loss_fn ran a forward pass that the loss does not need: run it under torch.no_grad()")

    def _forward(self, unit: Any, args: tuple, output: Any) -> None:
        # A checkpointed block's forward runs again within the backward pass: that is no use of its own.
        if not self._last or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._forwards[unit] += 1
        first = self._forwards[unit] == 1  # and so the last in the backward pass

        def backward(grad: Tensor) -> None:
            unit.set_requires_gradient_sync(first, recurse=False)
            unit.set_reshard_after_backward(first or self._reshard, recurse=False)
            (self._waiting.discard if first else self._waiting.add)(unit)

        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)
