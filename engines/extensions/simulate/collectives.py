"""Collectives of a world of which one rank runs: their bytes, and results on the host as if all ranks did the same."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_iter

PLAIN = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
SILENT = ("wait_tensor", "barrier")


class Call(NamedTuple):
    """A collective."""

    name: str  # all_gather, reduce_scatter, all_reduce, all_to_all or broadcast
    sent: int  # bytes that each rank sends
    ranks: int


def describe_call(function: Any, args: tuple, kwargs: dict[str, Any]) -> Call | None:
    """Return what a collective sends, None for one of a single rank and for one that sends nothing."""
    name = function._schema.name.partition("::")[2]
    ranks = _ranks(args, kwargs)
    if ranks == 1 or any(word in name for word in SILENT):
        return None
    sizes: dict[int, int] = {}
    for tensor in tree_iter((args, kwargs)):
        if isinstance(tensor, Tensor):
            sizes[id(tensor)] = tensor.nbytes
    largest = max(sizes.values(), default=0)
    if name in ("allgather_", "all_gather_into_tensor"):
        largest *= ranks  # each argument is of one rank
    # In a ring of n ranks, a rank sends (n - 1) / n of the bytes of the largest tensor, and those of a reduction twice.
    plain = _plain(name)
    return Call(plain, (2 if plain == "all_reduce" else 1) * largest * (ranks - 1) // ranks, ranks)


def _plain(name: str) -> str:
    """Return the plain name of a collective, whatever underscores an operation's has."""
    return next((plain for plain in PLAIN if plain.replace("_", "") in name.replace("_", "")), name)


def _ranks(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the number of ranks of the group among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except (RuntimeError, TypeError):  # the operation of a reduction is an object, too
                continue
        if isinstance(value, str):
            try:
                return int(dist.distributed_c10d._resolve_process_group(GroupName(value)).size())
            except (RuntimeError, ValueError):  # the name of the operation of a reduction
                continue
    return 1


def same_values(function: Any, args: tuple) -> None:
    """Give the results of a gather on the device the values of its input, where they are known."""
    name = function._schema.name
    if name == "c10d::allgather_":
        for output, given in zip(args[0], args[1], strict=True):
            if (value := getattr(given, "fluvial_value", None)) is not None:
                for each in output:
                    each.fluvial_value = value
    if name not in ("c10d::_allgather_base_", "c10d::alltoall_base_"):
        return
    if (value := getattr(args[1], "fluvial_value", None)) is not None:
        result = torch.empty(args[0].shape, dtype=args[0].dtype)
        same_everywhere(function, (result, value))
        args[0].fluvial_value = result


def same_everywhere(function: Any, args: tuple) -> None:
    """Write the results of a collective on host tensors, as if every rank had passed what this one does."""
    name = function._schema.name.partition("::")[2]
    if name == "allgather_":
        outputs, inputs = args[0], args[1]
        for output, given in zip(outputs, inputs, strict=True):
            for each in output:
                each.copy_(given)
    elif name == "_allgather_base_":
        args[0].view(-1).copy_(args[1].reshape(-1).repeat(args[0].numel() // args[1].numel()))
    elif name == "alltoall_base_":
        output, given = args[0], args[1]
        if len(given):  # as many rows as arrive, of those that are sent
            output.copy_(given[torch.arange(len(output)) % len(given)])
        else:
            output.zero_()
    elif name == "allreduce_":
        for tensor in args[0]:
            tensor.mul_(_ranks(args[1:], {}))
