"""Steps of trained weights that are held in bfloat16: each is taken in float32 and rounded stochastically.

A value x between neighbours a < b of bfloat16 becomes b with probability (x - a) / (b - a), so that its mean is x. Rounding
to the nearest would lose every step that is smaller than half the distance of neighbours, 2^-9 of the value.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fluvial.core.random import DRAWN_AT_ONCE, Key, bits, fold_in, key
from fluvial.engines.streams import Stream

SEED = 0  # of the rounding of every run


def rounding_key(update: int) -> Key:
    """Return the key of an update, counted from 0, in which numbers of parameters and of rows are folded."""
    return fold_in(fold_in(key(SEED), Stream.ROUNDING), update)


def round_stochastically(x: Tensor, words: Tensor) -> Tensor:
    """Return float32 values as bfloat16, whose mean over the words is x; infinities and NaN stay.

    The lower 16 bits of a word are added to those that bfloat16 cuts off, and the sum is cut off.

    Args:
        x: values, float32.
        words: uniform integers of at least 16 bits, of the same shape.
    """
    held = x.view(torch.int32)
    rounded = ((held + (words & 0xFFFF).to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def first_row(parameter: nn.Parameter) -> int:
    """Return the number of this rank's first row of a parameter that is sharded by rows."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0]) if offset else 0


@torch.no_grad()
def write_rounded(weight: Tensor, value: Tensor, key: Key, *, row: int) -> None:
    """Round float32 values into a bfloat16 weight, in place; a draw depends on the row's number over all ranks alone.

    Args:
        weight: this rank's rows.
        value: values to round.
        key: key of the parameter in this update.
        row: number of this rank's first row.
    """
    if not weight.numel():  # a rank without rows
        return
    weight, value = (tensor.view(len(tensor), -1) if tensor.ndim else tensor.view(1, 1) for tensor in (weight, value))
    at_once = max(1, DRAWN_AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), at_once):
        part = value[start : start + at_once]
        rows = torch.arange(row + start, row + start + len(part), device=weight.device)
        weight[start : start + len(part)] = round_stochastically(part, bits(fold_in(key, rows), tuple(part.shape)))


def step_rounded(optimizer: Optimizer, places: list[tuple[int, int]], key: Key) -> None:
    """Take a step of an elementwise optimizer, one parameter at a time in float32 if it is held in bfloat16.

    Args:
        optimizer: optimizer of plain parameters, with their gradients.
        places: number of each parameter among all, and of this rank's first row, in the order of the groups.
        key: key of the update.
    """
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    left = iter(places)
    try:
        for group, _ in groups:
            group["params"] = []
        for group, parameters in groups:
            for parameter in parameters:
                number, row = next(left)
                group["params"] = [parameter]
                if parameter.dtype == torch.float32 or parameter.grad is None:
                    optimizer.step()
                    continue
                with _in_float32(optimizer, parameter) as master:
                    group["params"] = [master]
                    optimizer.step()
                write_rounded(parameter, master.detach(), fold_in(key, number), row=row)
            group["params"] = []
    finally:
        for group, parameters in groups:
            group["params"] = parameters


@contextmanager
def _in_float32(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Yield a float32 copy of a parameter and of its gradient, which has the parameter's optimizer state meanwhile."""
    master = nn.Parameter(parameter.detach().float())
    master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.state[master] = optimizer.state.pop(parameter)
    try:
        yield master
    finally:
        optimizer.state[parameter] = optimizer.state.pop(master)
