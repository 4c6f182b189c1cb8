"""Results of operations on the simulated device: as on the CPU in all but values, at every call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fluvial.engines.extensions.simulate.simulation import simulate

pytestmark = pytest.mark.simulated


class Seen(NamedTuple):
    """What a tensor is, but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    argument: bool  # whether it is an argument itself
    shares: bool  # whether its storage is an argument's
    bytes: int  # of its storage


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda a, b: nn.functional.linear(a, b),
    "product": lambda a, b: a.mT @ b,
    "sum in another dtype": lambda a, b: a.sum(0, dtype=torch.float64),
    "cast": lambda a, b: a.to(torch.bfloat16),
    "no cast": lambda a, b: a.to(torch.float32),
    "comparison": lambda a, b: a > b,
    "scalar": lambda a, b: a * 2,
    "view": lambda a, b: a.view(2, 2, 6),
    "transposed": lambda a, b: a.t(),
    "slice": lambda a, b: a[1:3, 2:],
    "slice of a slice": lambda a, b: a[1:][1:, 3:],
    "expanded": lambda a, b: a[:1].expand(5, 6),
    "strided": lambda a, b: a.as_strided((2, 2), (3, 1), 4),
    "detached": lambda a, b: a.detach(),
    "copy": lambda a, b: a.t().contiguous(),
    "contiguous already": lambda a, b: a.contiguous(),
    "in place": lambda a, b: a.add_(b),
    "in place with itself": lambda a, b: a.mul_(a),
    "into a tensor": lambda a, b: torch.add(a, b, out=b),
    "of a list": lambda a, b: torch.cat([a, b], 1),
    "in place of a list": lambda a, b: torch._foreach_add_([a, b], 1.0) or a,
    "to a list": lambda a, b: a.split(2),
    "two results": lambda a, b: a.max(dim=1),
    "norm": lambda a, b: nn.functional.layer_norm(a, (6,)),
    "softmax": lambda a, b: a.softmax(-1),
    "new": lambda a, b: torch.zeros_like(a, dtype=torch.int32),
    "index": lambda a, b: a[:, [0, 2]],
    "complex": lambda a, b: torch.view_as_complex(a.view(4, 3, 2)),
    "empty": lambda a, b: a[:0] + 1,
}


def seen(call: Callable[[Tensor, Tensor], Any], device: torch.device) -> list[Seen]:
    a, b = torch.ones(4, 6, device=device), torch.ones(4, 6, device=device)
    found = tree_leaves(call(a, b))
    storages = {tensor.untyped_storage()._cdata for tensor in (a, b)}
    return [
        Seen(
            tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, each is a or each is b,
            each.untyped_storage()._cdata in storages, each.untyped_storage().nbytes(),
        )
        for each in found
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_the_cpu_at_every_call(name: str) -> None:
    """Shapes, strides, offsets, dtypes, and which storages are shared; the arguments of the third call are other tensors."""
    expected = seen(OPERATIONS[name], torch.device("cpu"))
    with simulate() as simulation:
        for _ in range(3):
            assert seen(OPERATIONS[name], simulation.world.device) == expected


def test_what_decides_a_result_is_told_apart() -> None:
    """Dtypes, strides, numbers and their types, after a call that differs in nothing else."""
    with simulate() as simulation:
        x = torch.ones(4, 6, device=simulation.world.device)
        assert [(x * 2).dtype, (x.int() * 2).dtype, (x.int() * 2.0).dtype] == [torch.float32, torch.int32, torch.float32]
        assert [(y + 1).stride() for y in (x, x.t(), x)] == [(6, 1), (1, 6), (6, 1)]
        assert [x[:2].shape[0], x[:3].shape[0], x[1:].storage_offset(), x[2:].storage_offset()] == [2, 3, 6, 12]
        with pytest.raises(RuntimeError, match="simulated:0 and cpu"):
            x + torch.ones(4, 6)


def test_kept_results_count_like_first_ones() -> None:
    with simulate() as simulation:
        mode, x = simulation.mode, torch.ones(8, 8, device=simulation.world.device)
        kept = []
        for _ in range(3):
            before = mode.ledger.now, mode.flops[""], mode.operations[""]
            y = x @ x
            kept.append((mode.ledger.now - before[0], mode.flops[""] - before[1], mode.operations[""] - before[2]))
            del y
        assert kept == [(4 * 64, 2 * 8**3, 1)] * 3


def test_a_view_of_an_emptied_storage_leaves_it_empty() -> None:
    """As those that FSDP2 makes of parameters that are not gathered."""
    with simulate() as simulation:
        for _ in range(2):
            x = torch.ones(4, 6, device=simulation.world.device)
            x.view(24)
            x.untyped_storage().resize_(0)
            held = simulation.mode.ledger.now
            x.view(24)
            assert (simulation.mode.ledger.now, x.untyped_storage().nbytes()) == (held, 0)
            del x
