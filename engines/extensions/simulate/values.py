"""Values that are known on the simulated device: few numbers that follow from the host's, as lengths, masks and steps."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

aten = torch.ops.aten
FEW = 2**16  # numbers of a tensor, at most
# Floating-point values only as long as they are moved, cut and joined: rewards that are gathered.
NAMES = "cat stack view unsqueeze squeeze detach clone slice select expand alias _unsafe_view t transpose unbind split"
MOVES = {getattr(aten, name) for name in NAMES.split(" ")}
UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the host, if they are known and few."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "fluvial_value", None)
    return tensor.detach() if tensor.numel() <= FEW and tensor.device.type == "cpu" else None


def follow(func: Any, args: tuple, kwargs: dict[str, Any], results: list[FakeTensor]) -> None:
    """Give the results of an operation their values, where they follow from known ones, and take away outdated ones."""
    values = _compute_values(func, args, kwargs, results)
    if values is not None:
        for result, value in zip(results, values, strict=True):
            result.fluvial_value = value  # type: ignore[attr-defined]
    elif func._schema.is_mutable:
        for result in results:
            vars(result).pop("fluvial_value", None)


def _compute_values(func: Any, args: tuple, kwargs: dict[str, Any], results: list[FakeTensor]) -> list[Tensor] | None:
    """Return the values of the results, None if they are not known."""
    packet = func.overloadpacket
    if packet in UNFILLED or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    moves = packet in MOVES
    if not all(each.numel() <= FEW and (moves or not (each.is_floating_point() or each.is_complex())) for each in results):
        return None
    known = []
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            value = value_of(leaf)
            if value is None:
                return None
            known.append(value)
    remaining = iter(known)
    args, kwargs = tree_map_only(Tensor, lambda _: next(remaining), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return [leaf for leaf in tree_iter(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
