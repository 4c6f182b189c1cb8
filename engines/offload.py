"""Offload of tensors to the host while they are not needed: storages between phases, saved activations, frozen blocks."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fluvial.models.device import is_accelerator
from fluvial.models.lora import is_adapter
from fluvial.models.quantised import find_quantised

ALIGNMENT = 512  # bytes; allocators align storages to it, so that kernels and bits are those of separate tensors


class HostOffload:
    """Offload of tensors' storages to the host and back, bit for bit. The tensors stay the same objects.

    Memory: as many bytes on the host, pinned for a GPU, and none on the device, where the storages are emptied. On a CPU the
    same happens and saves nothing.

    Args:
        device: device of the tensors. Tensors on another device are ignored.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: list[tuple[Tensor, Tensor]] = []  # view of a whole storage on the device, and its copy on the host

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and empty them on the device. Offloaded storages are skipped."""
        pinned = is_accelerator(self.device)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or tensor.device.type != self.device.type:
                continue
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
            self._moved.append((whole, host.copy_(whole)))
            storage.resize_(0)

    def onload(self) -> None:
        """Copy every storage back to the device."""
        for whole, host in self._moved:
            whole.untyped_storage().resize_(host.nbytes)
            whole.copy_(host, non_blocking=True)
        if self._moved and is_accelerator(self.device):
            torch.get_device_module(self.device).current_stream().synchronize()  # before the host's memory is freed
        self._moved.clear()

    def check_onloaded(self) -> None:
        """Raise ValueError if any storage is on the host."""
        if self._moved:
            raise ValueError("tensors of the engine are offloaded to the host: call onload() first")


class SavedOnHost(NamedTuple):
    """A tensor saved for the backward pass, on the host."""

    host: Tensor | None  # None for a tensor of the meta device
    like: tuple[tuple[int, ...], torch.dtype]  # shape and dtype
    device: torch.device


def call_with_offload(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and keep its tensors for the backward pass on the host until the backward pass reads them.

    Around `checkpoint` these are the inputs of a block. Copies of a GPU's tensors are pinned and asynchronous. On a CPU they
    are copies too, and save nothing.
    """
    with saved_tensors_hooks(_pack, _unpack):
        return forward(*args, **kwargs)


def _pack(tensor: Tensor) -> SavedOnHost:
    if tensor.is_meta:  # unpacking creates new tensors, as on a device
        return SavedOnHost(None, (tuple(tensor.shape), tensor.dtype), tensor.device)
    pinned = is_accelerator(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return SavedOnHost(host.copy_(tensor, non_blocking=pinned), (tuple(tensor.shape), tensor.dtype), tensor.device)


def _unpack(saved: SavedOnHost) -> Tensor:
    if saved.host is not None:
        return saved.host.to(saved.device, non_blocking=True, copy=True)
    shape, dtype = saved.like
    return torch.empty(shape, dtype=dtype, device=saved.device)


def list_frozen_tensors(block: nn.Module) -> list[Tensor]:
    """Return the frozen parameters of a block except adapters, and the codes and scales of its quantised layers."""
    parameters = [p for name, p in block.named_parameters() if not (p.requires_grad or is_adapter(name))]
    return parameters + [each for layer in find_quantised(block).values() for each in layer.quantised if each.numel()]


def count_copied_bytes(sizes: Sequence[int], *, backward: bool) -> int:
    """Return the bytes that a pass copies to the device, after earlier passes of the same kind.

    A forward pass without gradient copies every block. A forward and backward pass copies all but two blocks in each
    direction, because two are still on the device when the direction changes.

    Args:
        sizes: bytes of each block, in the order of the forward pass.
        backward: whether a backward pass follows.
    """
    if len(sizes) < 3:
        return 0
    return sum(sizes[2:]) + sum(sizes[:-2]) if backward else sum(sizes)


class BlockSwap:
    """Block swap: copies of blocks' frozen tensors from the host to the device for their passes.

    Nothing is copied back, because the tensors are frozen. While a block computes, the next one is copied: the one after it
    in a forward pass, the one before it in a backward pass. At most two blocks are on the device. The tensors stay the same
    objects.

    Outside of a pass they are views of host memory, pinned for an accelerator, so that state dicts and exports can read
    them. Copies to an accelerator overlap with the computation. On a CPU the copies are made as well, and save nothing.

    Args:
        blocks: blocks in the order of the forward pass, whose frozen tensors are on the host.
        device: device of the computation.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._device = torch.get_device_module(device) if is_accelerator(device) else None
        self._stream: Any = None if self._device is None else self._device.Stream()
        self._blocks = [_pack_block(list_frozen_tensors(block), device) for block in blocks]
        self._here: dict[int, Any] = {}  # events that end the copies, by index of each block on the device
        for place, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, place), prepend=True)
            block.register_forward_hook(partial(self._expect_backward, place))

    def reshard(self) -> None:
        """Free the blocks that are on the device."""
        for place in [*self._here]:
            self._free(place)

    def _enter(self, place: int, *_: Any) -> None:
        """Wait for a block's copy, begin that of the next block of the pass, and free the others."""
        back = torch._C._current_graph_task_id() != -1 or (torch.is_grad_enabled() and place == len(self._blocks) - 1)
        following = (abs(place - 1) if back else place + 1) % len(self._blocks)
        for other in {*self._here} - {place, following}:
            self._free(other)
        self._bring(place)
        if self._device is not None:
            self._device.current_stream().wait_event(self._here[place])
        self._bring(following)

    def _expect_backward(self, place: int, block: Any, args: tuple, output: Any) -> None:
        # The hook runs before the first operation of the block's backward pass, after those of all later blocks.
        for leaf in optree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._enter, place))

    def _bring(self, place: int) -> None:
        """Begin to copy a block to the device, unless it is there already."""
        if place in self._here:
            return
        block = self._blocks[place]
        block.there.untyped_storage().resize_(block.host.nbytes)
        stream = nullcontext() if self._device is None else self._device.stream(self._stream)
        if self._device is not None:  # its earlier work may use the same memory
            self._stream.wait_stream(self._device.current_stream())
        # The values are the same as before, so tensors saved for the backward pass stay valid.
        with stream, torch.autograd._unsafe_preserve_version_counter(block.there):
            block.there.copy_(block.host, non_blocking=True)
        self._here[place] = None if self._device is None else self._stream.record_event()
        _set_data(block.tensors, block.views)

    def _free(self, place: int) -> None:
        """Give a block's tensors their values on the host, and empty its memory on the device."""
        block, event = self._blocks[place], self._here.pop(place)
        if self._device is not None:
            self._device.current_stream().wait_event(event)  # the copy may not have been used yet
        _set_data(block.tensors, block.host_views)
        block.there.untyped_storage().resize_(0)


class _PackedBlock(NamedTuple):
    """Frozen tensors of a block in one buffer on the host, and in one on the device, which is emptied between passes."""

    tensors: list[Tensor]
    host: Tensor  # uint8
    there: Tensor
    host_views: list[Tensor]
    views: list[Tensor]


def _pack_block(tensors: list[Tensor], device: torch.device) -> _PackedBlock:
    """Move the values of tensors to one buffer on the host."""
    starts = [*accumulate((math.ceil(each.nbytes / ALIGNMENT) * ALIGNMENT for each in tensors), initial=0)]
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_accelerator(device))
    there = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    views = [
        [
            memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for each, start in zip(tensors, starts, strict=False)
        ]
        for memory in (host, there)
    ]
    for each, view in zip(tensors, views[0], strict=True):
        view.copy_(each.detach())
        each.data = view
    there.untyped_storage().resize_(0)
    return _PackedBlock(tensors, host, there, *views)


def _set_data(tensors: list[Tensor], views: list[Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
