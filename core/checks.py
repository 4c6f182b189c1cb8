"""Argument checks: they always run, and raise one line with what was got and what was expected."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(function: str, **tensors: Tensor) -> torch.dtype:
    """Return the dtype that `function` computes in: float64 if any argument is float64, else float32.

    Raises:
        TypeError: an argument is not a tensor of dtype float16, bfloat16, float32 or float64.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} is a {type(tensor).__name__}, expected a tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{function}: {name} is {tensor.dtype}, expected float16, bfloat16, float32 or float64")
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def check_same_shape(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the shape of the first (`[B, *event]`, at least one dimension)."""
    (first, expected), *others = tensors.items()
    if expected.ndim == 0:
        raise ValueError(f"{function}: {first} has shape [], expected [B, *event]")
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{function}: {name} has shape {list(tensor.shape)}, expected {list(expected.shape)} as {first}"
            )


def check_same_device(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are dense and on the device of the first."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{function}: {name} has layout {tensor.layout}, expected torch.strided")
        if tensor.device != tensors[first].device:
            raise ValueError(f"{function}: {name} is on {tensor.device}, expected {tensors[first].device} as {first}")


def check_per_sample(function: str, batch: int, **scalars: Tensor) -> None:
    """Raise ValueError unless every tensor is 0-d or `[batch]`."""
    for name, scalar in scalars.items():
        if scalar.ndim > 0 and scalar.shape != (batch,):
            raise ValueError(f"{function}: {name} has shape {list(scalar.shape)}, expected [] or [{batch}]")


def check_choice(function: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{function}: {name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_number(function: str, name: str, value: float, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless `value` is a finite Python number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}, expected a number")
    if not low <= value <= high or value in (math.inf, -math.inf):
        bounds = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{function}: {name} is {value}, expected a finite number {bounds}")


_looking = True


@contextmanager
def trusted_values() -> Iterator[None]:
    """Let no check read a tensor's values: they were validated when the schedule was built.

    For loops that must not wait for a device, or pay for a look at each micro-batch. Shapes and dtypes are still checked.
    """
    global _looking
    kept, _looking = _looking, False
    try:
        yield
    finally:
        _looking = kept


def can_look(*tensors: Tensor) -> bool:
    """Whether the tensors' values can be read for nothing: on the CPU, outside compilation and torch.func transforms."""
    if not _looking or torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors)


def per_sample(scalar: Tensor, samples: Tensor) -> Tensor:
    """View a `[B]` tensor as `[B, 1, ...]` against `samples` `[B, *event]`; a 0-d tensor stays as it is."""
    return scalar if scalar.ndim == 0 else scalar.reshape(-1, *[1] * (samples.ndim - 1))
