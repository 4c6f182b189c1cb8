"""Counts of bytes, launches and saved bytes of the hot path of a step: eager, compiled and fused.

    must move   every input is read once, and every result of that size written once
    moves       bytes that the launches read and write: operands and results of an eager operation, the compiler's count
                for the kernels of a compiled graph, operands of the launches of a fused operation
    saved       bytes kept for the backward pass

Nothing is timed, so counts are the same with and without a GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fluvial.bench import harness
from fluvial.bench.operations import OPERATIONS, SHAPES, Operation, count_bytes, make_inputs
from fluvial.kernels import dispatch

SHAPE = "SD3.5 512^2"
VIEWS = (
    "view",
    "reshape",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "detach",
    "t.",
    "transpose",
    "permute",
    "alias",
    "empty",
)


@dataclass(frozen=True)
class TrafficRow:
    """Counts of one forward and backward pass of a provider."""

    op: str
    provider: str
    shape: str
    must_move_bytes: int
    moved_bytes: int
    launches: int
    saved_bytes: int
    torch: str


@dataclass(frozen=True)
class TrafficConfig:
    """Count bytes, launches and saved bytes of the hot path of a step.

    Args:
        batch: number of samples.
        out: folder of traffic.csv, which is overwritten.
    """

    batch: int = 2
    out: Path = harness.RESULTS


class Operations(TorchDispatchMode):
    """Mode that calls `note(name, operands, results)` for every operation that launches a kernel; views do not."""

    def __init__(self, note: Callable[[str, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).removeprefix("aten.").startswith(VIEWS):
            self.note(str(func), _list_tensors((args, kwargs)), _list_tensors(result))
        return result


def count(operation: Operation, provider: str, *, batch: int = 2, shape: str = SHAPE) -> TrafficRow:
    """Count one forward and backward pass of an operation by eager, compiled or fused."""
    event = SHAPES[shape]
    samples, numbers = make_inputs(operation, batch, event, dtype=torch.bfloat16, device="cpu")
    moved = count_bytes(operation, batch, event, dtype=torch.bfloat16)
    counted = {"eager": _count_eager, "compiled": _count_compiled, "fused": _count_fused}[provider]
    saved = list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        bytes_moved, launches = counted(operation, samples, numbers)
    owned = {tensor.data_ptr() for tensor in samples.values()}
    kept = {t.data_ptr(): _count_bytes(t) for t in saved if t.data_ptr() not in owned}
    return TrafficRow(
        op=operation.name,
        provider=provider,
        shape=f"{batch} x {shape}",
        must_move_bytes=moved["both" if operation.gradients else "forward"],
        moved_bytes=bytes_moved,
        launches=launches,
        saved_bytes=sum(kept.values()),
        torch=torch.__version__,
    )


def _run_pass(operation: Operation, provider: str, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> None:
    differentiated = [samples[name].requires_grad_() for name in operation.gradients]
    result = operation.call(provider, samples, numbers)
    if differentiated:
        torch.autograd.grad(result, differentiated, torch.ones_like(result))


def _count_eager(operation: Operation, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> tuple[int, int]:
    moved = list[int]()
    with Operations(lambda name, operands, results: moved.append(sum(map(_count_bytes, operands + results)))):
        _run_pass(operation, "reference", samples, numbers)
    return sum(moved), len(moved)


def _count_compiled(operation: Operation, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> tuple[int, int]:
    from torch._inductor import compile_fx, config, metrics

    torch._dynamo.reset()
    metrics.reset()
    # The compiler counts bytes when its metrics are logged.
    log = patch.object(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: level == logging.INFO)
    quiet = patch.object(compile_fx.inductor_metrics_log, "info", lambda *args, **kwargs: None)
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False), log, quiet:
        _run_pass(operation, "compiled", samples, numbers)
    return metrics.num_bytes_accessed, metrics.generated_kernel_count


def _count_fused(operation: Operation, samples: dict[str, Tensor], numbers: dict[str, Tensor]) -> tuple[int, int]:
    from fluvial.bench import aot

    with aot.caught() as launches, patch.object(dispatch, "FUSED", {*dispatch.FUSED, "cpu"}):
        _run_pass(operation, "triton", samples, numbers)
    return sum(_count_bytes(tensor) for launch in launches for tensor in _list_tensors(launch.arguments)), len(launches)


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def run(config: TrafficConfig) -> list[TrafficRow]:
    """Overwrite traffic.csv and print it."""
    rows = [
        count(operation, provider, batch=config.batch)
        for operation in OPERATIONS
        for provider in ("eager", "compiled", "fused")
    ]
    harness.write(config.out / "traffic.csv", rows, TrafficRow)
    lines = [
        {
            "op": row.op,
            "provider": row.provider,
            "shape": row.shape,
            "must move MB": f"{row.must_move_bytes / 1e6:.2f}",
            "moves MB": f"{row.moved_bytes / 1e6:.2f}",
            "launches": str(row.launches),
            "saved MB": f"{row.saved_bytes / 1e6:.2f}",
        }
        for row in rows
    ]
    harness.show_table("forward and backward, bytes and launches counted", lines, left=3)
    return rows
