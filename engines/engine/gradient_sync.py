"""Gradient synchronisation of a block that the last backward pass uses more than once, as guidance in two passes does.

FSDP reduces a block's gradients and frees its parameters after each use of the block. If two uses share a backward pass, the
gradients of earlier micro-batches are reduced after the first use and the rest after the second, and the parameters are
gathered again in between.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class LastBackward:
    """Lets each unit reduce its gradients, and free its parameters, after its last use in the update's last backward pass.

    Args:
        units: units of communication.
        reshard: whether a unit's parameters are freed after each use all the same.
    """

    def __init__(self, units: Sequence[FSDPModule], *, reshard: bool) -> None:
        self._reshard, self._last = reshard, False
        self._forwards: Counter[FSDPModule] = Counter()
        self._waiting: set[FSDPModule] = set()
        for unit in units:
            unit.register_forward_hook(self._forward)  # type: ignore[attr-defined]

    def begin(self, last: bool) -> None:
        """Begin a micro-batch; `last`: whether it is the update's last one."""
        self._last = last
        self._forwards.clear()

    def end(self) -> None:
        """End the update; ValueError if the loss does not need a forward pass, so that gradients were never reduced."""
        self._last = False  # outside of an update FSDP's own rule applies
        if self._waiting:
            self._waiting.clear()
            raise ValueError("update: loss_fn ran a forward pass that the loss does not need: run it under torch.no_grad()")

    def _forward(self, unit: Any, args: tuple, output: Any) -> None:
        # A checkpointed block runs its forward again within the backward pass; that is not a use of its own.
        if not self._last or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._forwards[unit] += 1
        first = self._forwards[unit] == 1  # first in the forward pass is last in the backward pass

        def backward(grad: Tensor) -> None:
            unit.set_requires_gradient_sync(first, recurse=False)
            unit.set_reshard_after_backward(first or self._reshard, recurse=False)
            (self._waiting.discard if first else self._waiting.add)(unit)

        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(backward)
