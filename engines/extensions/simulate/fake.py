"""Fake tensors: a shape, a dtype, a device and a storage size, and the results of operations on them.

Small tensors that follow from host values, such as lengths, masks and steps, have values (`propagate_values`).
"""

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only

from fluvial.models.flops import FORMULAS

# The shapes of these results do not follow from shapes, or the operations change the shape of an argument.
UNLIKE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class FakeMode(FakeTensorMode):
    """Mode of fake tensors for several threads: the state that PyTorch keeps in the mode is kept per thread.

    PyTorch's own cache of results is off: `ResultCache` is faster, and PyTorch's refills an emptied storage by a view of it.
    """

    def __init__(self, **options: Any) -> None:
        self._local = threading.local()
        super().__init__(**options)
        self.cache_enabled = False

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread runs a kernel, for which fake tensors report the device meta."""
        return getattr(self._local, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._local.in_kernel = value

    @property
    def enter_stack(self) -> list[Any]:
        """Modes that were active when this thread entered the mode, one per entry."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[Any] = self._local.stack
        return stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._local.stack = value


class FakeResult(NamedTuple):
    """Tensor returned by an operation."""

    argument: int | None  # index of the returned or viewed tensor among the arguments
    is_view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class OperationResult(NamedTuple):
    """Results and floating-point operations of an operation for certain shapes of its arguments."""

    results: tuple[FakeResult, ...]
    structure: Any  # pytree structure of the result
    flops: int


class ResultCache:
    """Cache of operations on fake tensors, by the shapes of their arguments; a hit takes a quarter of the time.

    Args:
        mode: mode that computes the results for new shapes.
    """

    def __init__(self, mode: FakeMode) -> None:
        self.mode = mode
        self._known: dict[Hashable, OperationResult | None] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Return the result of an operation and its floating-point operations.

        Of host tensors among the arguments only the shapes count.

        Raises:
            RuntimeError: the arguments do not fit together, e.g. because of their shapes or devices.
        """
        leaves, structure = optree.tree_flatten((args, kwargs), none_is_leaf=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            key = (func, structure, *map(_describe_leaf, leaves))
            known = self._known.get(key)
        except TypeError:  # an argument has no hash
            return self._compute(func, args, kwargs)
        if known is not None:
            return self._rebuild(known, tensors), known.flops
        out, flops = self._compute(func, args, kwargs)
        if key not in self._known:
            self._known[key] = _describe_result(func, tensors, out, flops)
        return out, flops

    def _compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
        args, kwargs = optree.tree_map(self._to_fake, (args, kwargs), none_is_leaf=True)
        with self.mode:
            out = func(*args, **kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        return out, 0 if formula is None else int(formula(*args, **kwargs, out_val=out))

    def _to_fake(self, leaf: Any) -> Any:
        """Return a host tensor without its values."""
        if isinstance(leaf, FakeTensor) or not isinstance(leaf, Tensor):
            return leaf
        with self.mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    def _rebuild(self, known: OperationResult, tensors: Sequence[Tensor]) -> Any:
        """Build the results of a known operation."""
        results = list[Tensor]()
        with torch._C._DisableTorchDispatch():
            for result in known.results:
                if result.argument is not None and not result.is_view:
                    results.append(tensors[result.argument])
                    continue
                empty = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
                if result.argument is not None:
                    storage = tensors[result.argument].untyped_storage()
                    size = storage.nbytes()
                    empty.set_(storage, result.offset, result.shape, result.stride)
                    if storage.nbytes() != size:  # FSDP2 has emptied it
                        storage.resize_(size)
                results.append(FakeTensor(self.mode, empty, result.device))
        return optree.tree_unflatten(known.structure, results)


def _describe_leaf(leaf: Any) -> Hashable:
    """Return the properties of an argument on which the results depend."""
    if isinstance(leaf, Tensor):
        device = leaf.fake_device if isinstance(leaf, FakeTensor) else leaf.device
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, device
    return type(leaf), leaf


def _describe_result(func: Any, tensors: Sequence[Tensor], out: Any, flops: int) -> OperationResult | None:
    """Return the effect of an operation; None if it does not depend on shapes only."""
    results, structure = optree.tree_flatten(out)
    all_tensors = [*tensors, *results]
    if UNLIKE.intersection(func.tags) or not all(isinstance(each, FakeTensor) for each in results):
        return None
    if any(
        each.is_complex() or each.layout != torch.strided or getattr(each, "constant", None) is not None
        for each in all_tensors
    ):
        return None
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    outputs = list[FakeResult]()
    for result in results:
        same = next((number for number, tensor in enumerate(tensors) if tensor is result), None)
        storage = result.untyped_storage()
        viewed = storages.index(storage._cdata) if same is None and storage._cdata in storages else None
        size = sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)) + 1
        if same is None and viewed is None and storage.nbytes() != (size * result.itemsize if result.numel() else 0):
            return None
        shape = tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, result.fake_device
        outputs.append(FakeResult(viewed if same is None else same, viewed is not None, *shape))
    return OperationResult(tuple(outputs), structure, flops)


aten = torch.ops.aten
FEW = 2**16  # largest number of elements of a tensor with values
# Floating-point tensors keep values only while they are moved, cut and joined, as rewards are when they are gathered.
NAMES = "cat stack view unsqueeze squeeze detach clone slice select expand alias _unsafe_view t transpose unbind split"
MOVES = {getattr(aten, name) for name in NAMES.split(" ")}
UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


def read_value(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on the host if they are known and few, else None."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "fluvial_value", None)
    return tensor.detach() if tensor.numel() <= FEW and tensor.device.type == "cpu" else None


def propagate_values(func: Any, args: tuple, kwargs: dict[str, Any], results: list[FakeTensor]) -> None:
    """Set the values of an operation's results if they follow from known ones, and remove outdated ones."""
    values = _compute_values(func, args, kwargs, results)
    if values is not None:
        for result, value in zip(results, values, strict=True):
            result.fluvial_value = value  # type: ignore[attr-defined]
    elif func._schema.is_mutable:
        for result in results:
            vars(result).pop("fluvial_value", None)


def _compute_values(func: Any, args: tuple, kwargs: dict[str, Any], results: list[FakeTensor]) -> list[Tensor] | None:
    """Return the values of the results, or None if they are unknown."""
    packet = func.overloadpacket
    if packet in UNFILLED or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    moves = packet in MOVES
    if not all(each.numel() <= FEW and (moves or not (each.is_floating_point() or each.is_complex())) for each in results):
        return None
    known = []
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            value = read_value(leaf)
            if value is None:
                return None
            known.append(value)
    remaining = iter(known)
    args, kwargs = tree_map_only(Tensor, lambda _: next(remaining), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return [leaf for leaf in tree_iter(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
