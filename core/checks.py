"""Argument checks. They always run; an error is one line with the wrong value and what was expected."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Intervals of settings for `check_fields`. Values beyond them make no sense, and some would exhaust the machine's memory.
COUNT, INDEX = (1, 2**31), (0, 2**31)  # updates, and other counts
BATCH = (1, 2**20)  # samples of a rollout or of a pass, GPUs, prompts
STEPS = (1, 10_000)  # steps of a schedule; DDPM's has 1,000
PIXELS, FRAMES = (1, 2**14), (1, 2**14)  # height or width, and frames of a video
SCALE = (0, 1e3)  # guidance scale
ETA = (0, 10)  # noise scale of a sampler; published values are 0.2 to 1.5
RATE = (0, 100)  # learning rate; prodigy's is about 1
RANK = (1, 2**14)  # rank of an adapter
GIBIBYTES = (0, 1e6)


class FieldError(ValueError):
    """A field of a configuration has an invalid value.

    Args:
        field: dotted name of the field, e.g. "rollout.eta".
        problem: what is wrong; it completes a sentence that begins with the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"


def compute_dtype(function: str, **tensors: Tensor) -> torch.dtype:
    """Return the dtype that `function` computes in: float64 if any argument is float64, else float32.

    Raises:
        TypeError: an argument is not a tensor of dtype float16, bfloat16, float32 or float64.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name} is {type_of(tensor)}, expected a tensor")
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


def match_tensors(function: str, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of one shape, `[B, *event]`, in the dtype that `function` computes in.

    Raises:
        TypeError, ValueError: as `compute_dtype` and `check_same_shape` do.
    """
    dtype = compute_dtype(function, **tensors)
    check_same_shape(function, **tensors)
    return tuple(tensor.to(dtype) for tensor in tensors.values())


def check_same_device(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are dense and on the device of the first."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(f"{function}: {name} has layout {tensor.layout}, expected torch.strided")
        if tensor.device != tensors[first].device:
            raise ValueError(f"{function}: {name} is on {tensor.device}, expected {tensors[first].device} as {first}")


def check_per_sample(function: str, batch: int | torch.Size, **scalars: Tensor) -> None:
    """Raise ValueError unless every tensor is 0-d or `[B]`, or `[B, R]` where samples have R blocks.

    `batch` is B, or the shape `[B, R, ...]` of samples whose blocks may have separate numbers; then all tensors that are not
    0-d need the same shape.
    """
    size, shapes = (batch, ()) if isinstance(batch, int) else (batch[0], (batch[:2],) if len(batch) > 1 else ())
    by_row = next((scalar.shape for scalar in scalars.values() if scalar.shape in shapes), (size,))
    for name, scalar in scalars.items():
        if scalar.ndim > 0 and scalar.shape != by_row:
            also = "".join(f" or {list(shape)}" for shape in (shapes if by_row == (size,) else ()))
            raise ValueError(f"{function}: {name} has shape {list(scalar.shape)}, expected [] or {list(by_row)}{also}")


def check_group(function: str, group: Tensor, batch: int) -> None:
    """Raise unless `group` is an integer tensor `[batch]`.

    Raises:
        TypeError: it is not a tensor, or not of an integer dtype.
        ValueError: it has another shape.
    """
    if not isinstance(group, Tensor):
        raise TypeError(f"{function}: group is {type_of(group)}, expected a tensor of integers: use torch.tensor(group)")
    if group.shape != (batch,):
        raise ValueError(f"{function}: group has shape {list(group.shape)}, expected [{batch}]")
    if group.dtype.is_floating_point or group.dtype == torch.bool:
        raise TypeError(f"{function}: group is {group.dtype}, expected an integer dtype")


def check_choice(function: str, name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless the argument `name` of `function` is one of `choices`; the message suggests the nearest."""
    if not _is_among(value, choices):
        raise ValueError(f"{function}: {name} is {value!r}, expected {_list_accepted(value, choices)}")


def check_number(
    function: str,
    name: str,
    value: Tensor | float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    batch: int | torch.Size | None = None,
) -> None:
    """Raise unless the argument `name` of `function` is a finite number in [low, high].

    Args:
        function, name, value: names of the function and the argument, and its value.
        low, high: closed interval.
        batch: also accept a floating-point tensor, 0-d or `[batch]`, or as in `check_per_sample` if it is a shape. Values
            are checked if they are known (see `can_look`). None accepts only Python numbers.

    Raises:
        TypeError: `value` is not an int or a float. A bool is not a number.
        ValueError: `value` is infinite, NaN or out of range, or a tensor of another shape.
    """
    if isinstance(value, Tensor) and batch is not None:
        compute_dtype(function, **{name: value})
        check_per_sample(function, batch, **{name: value})
        if not can_look(value):
            return
        wrong = value[~((value >= low) & (value <= high) & value.isfinite())]
        if wrong.numel() == 0:
            return
        value = wrong.flatten()[0].item()
    if problem := _out_of_range(f"{function}: {name}", value, low, high, whole=False):
        raise ValueError(f"{function}: {name} {problem}")


def number(
    function: str, name: str, value: Tensor | float, like: Tensor, *, low: float = -math.inf, high: float = math.inf
) -> Tensor | float:
    """Return a hyper-parameter after `check_number`; a tensor is cast to the dtype of `like`, `[B, *event]`."""
    check_number(function, name, value, low=low, high=high, batch=like.shape[0])
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def check_fields(config: Any, owner: str | None = None, **bounds: tuple[float, float]) -> None:
    """Raise unless each field of a dataclass of type Literal, bool, int, float or dataclass has such a value, within bounds.

    A config calls `check_fields(self, steps=(1, 1000), eta=(0, math.inf))` in its `__post_init__`.
    A bool or a string is not a number, a number is not a bool, an int may stand for a float, and None passes where the
    type allows it. `Literal[...] | None`, a Literal beside other types, and `tuple[Literal[...], ...]` are supported.

    Args:
        config: dataclass instance.
        owner: name of the config in messages, by default from its class ("rollout" for RolloutConfig); "" for none.
        bounds: closed interval per numeric field; without one, any finite number passes.

    Raises:
        TypeError: a field has a value of another type.
        ValueError: a value is not accepted, not finite or out of bounds.
    """
    owner = type(config).__name__.removesuffix("Config").lower() if owner is None else owner
    kind: Any = type(config)
    for field, members in _list_field_types(kind):
        name, value = f"{owner}.{field}" if owner else field, getattr(config, field)
        _check_literal_field(name, value, members)
        numbers = {member for member in members if get_origin(member) is not Literal}
        if numbers & {int, float} and numbers <= {int, float, NoneType}:
            worded = isinstance(value, str) and len(numbers) < len(members)  # one of the Literals, checked above
            if not worded and (value is not None or NoneType not in members):
                low, high = bounds.get(field, (-math.inf, math.inf))
                if problem := _out_of_range(name, value, low, high, whole=float not in members):
                    raise FieldError(name, problem)
        elif set(members) <= {bool, NoneType} and not isinstance(value, members):
            raise TypeError(f"{name} is {type_of(value)}, expected True or False")
        elif all(map(dataclasses.is_dataclass, {*members} - {NoneType})) and not isinstance(value, members):
            expected = " or ".join("None" if member is NoneType else member.__name__ for member in members)
            raise TypeError(f"{name} is {type_of(value)}, expected {expected}")


@functools.cache
def _list_field_types(kind: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the name of each field of a dataclass, and the members of its type, one unless it is a union."""
    types = get_type_hints(kind)
    typed_fields = ((field.name, types[field.name]) for field in dataclasses.fields(kind))
    return tuple((name, get_args(t) if get_origin(t) in (Union, UnionType) else (t,)) for name, t in typed_fields)


def _check_literal_field(name: str, value: object, members: tuple[Any, ...]) -> None:
    literals = [member for member in members if get_origin(member) is Literal]
    sequences = [member for member in members if get_origin(member) is tuple and get_args(member)[1:] == (...,)]
    others = tuple(member for member in members if isinstance(member, type) and member is not tuple)
    if isinstance(value, tuple) and len(sequences) == 1:
        for item in value:
            _check_literal_field(name, item, get_args(sequences[0])[:1])
    elif literals and not isinstance(value, others):
        accepted = tuple(choice for literal in literals for choice in get_args(literal))
        beside = " or an integer" if int in others else ", True or False" if bool in others else ""
        accepted = (*accepted, None) if NoneType in members else accepted
        if not _is_among(value, accepted):
            raise FieldError(name, f"is {value!r}, expected {_list_accepted(value, accepted)}{beside}")


def _is_among(value: object, accepted: Collection[object]) -> bool:
    """Return whether a value is accepted; types must match, so True is not 1."""
    return any(type(value) is type(choice) and value == choice for choice in accepted)


def _list_accepted(value: object, accepted: Collection[object]) -> str:
    """Format the accepted values for a message, with the nearest match of a wrong string."""
    words = {choice.lower(): choice for choice in accepted if isinstance(choice, str)}
    near = difflib.get_close_matches(value.lower(), words, n=1) if isinstance(value, str) else []
    suggestion = f" (did you mean {words[near[0]]!r}?)" if near else ""
    one_of = "one of " if len(accepted) > 1 else ""
    return f"{one_of}{', '.join(map(repr, accepted))}{suggestion}"


def _out_of_range(where: str, value: object, low: float, high: float, *, whole: bool) -> str | None:
    """Describe why a number is out of range, None if it is not; raise TypeError if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{where} is {type_of(value)}, expected {'an integer' if whole else 'a number'}")
    if low <= value <= high and value not in (math.inf, -math.inf):
        return None
    bottom, top = _format_bound(low), _format_bound(high)
    bounds = f"in [{bottom}, {top}]" if high < math.inf else f">= {bottom}" if low > -math.inf else "of any size"
    return f"is {value}, expected {'an integer' if whole else 'a finite number'} {bounds}"


def _format_bound(value: float) -> str:
    """Format a bound for a message; an integer keeps all its digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def type_of(value: object) -> str:
    """Return the type of a value with its article, for a message: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def can_look(*tensors: Tensor) -> bool:
    """Return whether the tensors' values can be read: on the CPU, outside compilation, tracing and vmap.

    Values can be read under `func.grad` and `func.jvp`, but not of a tensor that `func.vmap` maps over, nor under a dispatch
    mode, which may have none (`FakeTensorMode`), record the read (`make_fx`) or count it. The caller must ensure that values
    that are not known are valid.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(_is_known(tensor) for tensor in tensors)


def _is_known(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return type(tensor) in (Tensor, Parameter) and tensor.device.type == "cpu"


def clip(values: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return the values clipped to [low, high]; unlike `torch.clamp`, one bound may be a number and the other a tensor."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (torch.as_tensor(bound, dtype=values.dtype, device=values.device) for bound in (low, high))
    return torch.clamp(values, low, high)  # type: ignore[arg-type]


def per_sample(scalar: Tensor, samples: Tensor) -> Tensor:
    """View a `[B]` or `[B, R]` tensor as `[B, 1, ...]` or `[B, R, 1, ...]` against `samples`; 0-d is unchanged."""
    return scalar if scalar.ndim == 0 else scalar.reshape(*scalar.shape, *[1] * (samples.ndim - scalar.ndim))


def first_block(number: Tensor) -> Tensor:
    """Return the first block's numbers of a tensor `[B, R]`; other shapes are returned unchanged."""
    return number[:, 0] if number.ndim == 2 else number
