"""Gradients and vmap of the fused operations, in autograd, torch.compile and torch.func.

The tensors of every operation have the batch first, so one rule serves all: a dimension that vmap adds is merged into the
batch. `torch.library` registers that rule and the gradient for autograd and torch.compile. torch.func's grad ignores that
registration and needs the same functions on an autograd.Function, which `differentiable` builds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SetupContext = Callable[[Any, tuple, Any], None]
Backward = Callable[..., Any]


def refuse_gradient_of_numbers(needed: Sequence[bool]) -> None:
    """Raise NotImplementedError if a per-sample number (a coefficient, an advantage, ...) needs a gradient."""
    if any(needed):
        raise NotImplementedError(
            "the fused kernels have gradients for samples, not for per-sample numbers: use implementation='reference'"
        )


def differentiable(
    operation: torch.library.CustomOpDef,
    *,
    out_dims: Sequence[int],
    setup_context: SetupContext | None = None,
    backward: Backward | None = None,
) -> Callable[..., Any]:
    """Register an operation's gradient and vmap rule, and return it as a function that torch.func can transform too.

    Args:
        operation: custom op on tensors (or None) with the batch first, and options.
        out_dims: batch dimension of each result. A result of shape [0] stands for None and is passed through.
        setup_context, backward: as for `register_autograd`; without them, a gradient raises an error.
    """

    def map_over(function: Callable[..., Any], info: Any, in_dims: Sequence[int | None], args: tuple) -> tuple[Any, Any]:
        folded, batch = [], 0
        for arg, dim in zip(args, in_dims, strict=True):
            if isinstance(arg, Tensor):
                arg = arg.expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
                batch = arg.shape[1]
                arg = arg.flatten(0, 1)
            folded.append(arg)
        results = function(*folded)
        single = isinstance(results, Tensor)
        mapped, dims = [], []
        for result, dim in zip((results,) if single else results, out_dims, strict=True):
            absent = result.shape == (0,) and batch > 0
            mapped.append(result if absent else result.unflatten(dim, (info.batch_size, batch)))
            dims.append(None if absent else dim)
        return (mapped[0], dims[0]) if single else (tuple(mapped), tuple(dims))

    class Functional(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return operation(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if backward is None:
                raise NotImplementedError(
                    f"{operation._qualname}: a fused gradient has no gradient of its own; for second derivatives use "
                    "implementation='reference'"
                )
            return backward(ctx, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
            return map_over(Functional.apply, info, in_dims, args)

    if backward is not None:
        operation.register_autograd(backward, setup_context=setup_context)
    operation.register_vmap(lambda info, in_dims, *args: map_over(operation, info, in_dims, args))

    def function(*args: Any) -> Any:
        transformed = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None
        return Functional.apply(*args) if transformed else operation(*args)

    return function
