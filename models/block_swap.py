"""Block swap: frozen weights of some blocks lie on the host, and are brought to the device one block ahead of the pass.

Nothing is copied back, because they are frozen. While a block computes, the next one of its pass is brought: the one after
it in a forward pass, the one before it in a backward pass. At most two of these blocks are on the device.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from fluvial.models.device import is_accelerator
from fluvial.models.lora import is_adapter
from fluvial.models.quantised import find_quantised

ALIGNMENT = 512  # bytes: what allocators align storages to, so that kernels and bits are those of tensors of their own


def frozen_tensors(block: nn.Module) -> list[Tensor]:
    """Return the frozen parameters of a block but its adapters, and the codes and scales of its quantised layers."""
    parameters = [p for name, p in block.named_parameters() if not (p.requires_grad or is_adapter(name))]
    return parameters + [each for layer in find_quantised(block).values() for each in layer.quantised if each.numel()]


def copies_per_pass(sizes: Sequence[int], *, backward: bool) -> int:
    """Return the bytes that a pass copies to the device after others of its kind.

    A forward pass without gradient copies every block. A forward and backward pass copies all but two on the way there, and
    all but two on the way back: those that are on the device where the direction turns.

    Args:
        sizes: bytes of each block, in the order of the forward pass.
        backward: whether a backward pass follows.
    """
    if len(sizes) < 3:
        return 0
    return sum(sizes[2:]) + sum(sizes[:-2]) if backward else sum(sizes)


class BlockSwap:
    """Brings frozen tensors of blocks to the device around their passes. The tensors stay the same objects.

    Outside of a pass they are views of host memory, pinned for an accelerator, so that state dicts and exports read them.
    On a CPU the copies are made as well, and save nothing. Copies to an accelerator run beside the computation.

    Args:
        blocks: blocks in the order of the forward pass, whose frozen tensors are on the host.
        device: device of the computation.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._device = torch.get_device_module(device) if is_accelerator(device) else None
        self._stream = None if self._device is None else self._device.Stream()
        self._blocks = [_pack(frozen_tensors(block), device) for block in blocks]
        self._here: dict[int, Any] = {}  # blocks on the device, each with the event that ends its copy
        for place, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, place), prepend=True)
            block.register_forward_hook(partial(self._expect_backward, place))

    def reshard(self) -> None:
        """Free the blocks that are on the device."""
        for place in [*self._here]:
            self._free(place)

    def _enter(self, place: int, *_: Any) -> None:
        """Have a block on the device, bring the next one of the pass, and free the others."""
        back = torch._C._current_graph_task_id() != -1 or (torch.is_grad_enabled() and place == len(self._blocks) - 1)
        following = (abs(place - 1) if back else place + 1) % len(self._blocks)
        for other in {*self._here} - {place, following}:
            self._free(other)
        self._bring(place)
        if self._device is not None:
            self._device.current_stream().wait_event(self._here[place])
        self._bring(following)

    def _expect_backward(self, place: int, block: Any, args: tuple, output: Any) -> None:
        # The hook runs before the first operation of the block's backward pass, when those of all later blocks are done.
        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._enter, place))

    def _bring(self, place: int) -> None:
        """Begin to copy a block to the device, unless it is there."""
        if place in self._here:
            return
        block, event = self._blocks[place], None
        block.there.untyped_storage().resize_(block.host.nbytes)
        # The same values as before: what the backward pass has saved of them is still right.
        with torch.autograd._unsafe_preserve_version_counter(block.there):
            if self._device is None:
                block.there.copy_(block.host)
            else:
                self._stream.wait_stream(self._device.current_stream())  # whose earlier work may use the same memory
                with self._device.stream(self._stream):
                    block.there.copy_(block.host, non_blocking=True)
                event = self._stream.record_event()
        self._here[place] = event
        _point(block.tensors, block.views)

    def _free(self, place: int) -> None:
        """Give a block's tensors their values on the host, and empty its memory on the device."""
        block, event = self._blocks[place], self._here.pop(place)
        if self._device is not None:
            self._device.current_stream().wait_event(event)  # of a copy that no pass has used
        _point(block.tensors, block.host_views)
        block.there.untyped_storage().resize_(0)


class _Packed(NamedTuple):
    """The frozen tensors of a block in one piece of memory on the host, and in one on the device, which is mostly empty."""

    tensors: list[Tensor]
    host: Tensor  # uint8
    there: Tensor
    host_views: list[Tensor]
    views: list[Tensor]


def _pack(tensors: list[Tensor], device: torch.device) -> _Packed:
    """Move the values of tensors to one piece of host memory."""
    starts = [*accumulate((math.ceil(each.nbytes / ALIGNMENT) * ALIGNMENT for each in tensors), initial=0)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_accelerator(device))
    there = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    held = [
        [
            memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for each, start in zip(tensors, starts, strict=False)
        ]
        for memory in (host, there)
    ]
    for each, view in zip(tensors, held[0], strict=True):
        view.copy_(each.detach())
        each.data = view
    there.untyped_storage().resize_(0)
    return _Packed(tensors, host, there, *held)


def _point(tensors: list[Tensor], views: list[Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
