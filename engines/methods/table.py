"""Table of methods by name, and checks of custom methods and their losses."""

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.ac_dmd import AcDmd
from fluvial.engines.methods.adjoint import AdjointMatching
from fluvial.engines.methods.alignprop import AlignProp
from fluvial.engines.methods.awm import Awm
from fluvial.engines.methods.branch import BranchGrpo
from fluvial.engines.methods.chunk import ChunkGrpo
from fluvial.engines.methods.crd import Crd
from fluvial.engines.methods.d3po import D3po
from fluvial.engines.methods.dense import DenseGrpo, TurningPointGrpo
from fluvial.engines.methods.dgpo import Dgpo
from fluvial.engines.methods.distill import Distill
from fluvial.engines.methods.dmd2 import Dmd2
from fluvial.engines.methods.dpo import Dpo
from fluvial.engines.methods.gardo import Gardo
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.kto import Kto
from fluvial.engines.methods.mapo import Mapo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.raft import Raft
from fluvial.engines.methods.refl import Refl
from fluvial.engines.methods.rtdmd import Rtdmd
from fluvial.engines.methods.sft import Sft
from fluvial.engines.methods.spo import Spo
from fluvial.engines.methods.srpo import Srpo
from fluvial.engines.methods.successors import Dppo, Guard, TempFlow
from fluvial.engines.methods.tdm import Tdm
from fluvial.engines.methods.tdm_r1 import TdmR1
from fluvial.engines.run.declared import Loss
from fluvial.engines.run.method import Method, explain_no_method

BUILT_IN: tuple[type[Method], ...] = (
    *(Grpo, Guard, Dppo, TempFlow, ChunkGrpo, DenseGrpo, TurningPointGrpo, BranchGrpo, Gardo, D3po, Spo),
    *(Nft, Awm, Dgpo, Crd, Raft, Sft, Dpo, Mapo, Kto),
    *(AlignProp, AdjointMatching, Refl, Srpo, Distill, Dmd2, AcDmd, Rtdmd, Tdm, TdmR1),
)
METHODS = {kind.method_name: kind for kind in BUILT_IN}


def method_type(name: str) -> type[Method]:
    """Return the class of a method: from the table, an entry point of `fluvial.methods`, or `module:Class`.

    Raises:
        UsageError: there is no such class, or it is not a method.
    """
    return plugins.load(name, "methods", explain_no_method, table=METHODS)


def with_checked_loss(method: Method) -> Callable[[Loss], Loss] | None:
    """Return a wrapper that checks the results of a loss; None for a built-in method."""
    if type(method) in METHODS.values():
        return None

    def check(loss: Loss) -> Loss:
        def call_checked(v: Tensor, rows: Any) -> tuple[Tensor, Any]:
            # Copies, so that in-place operations of the loss change no tensor of the run or the backward pass.
            v_copy, rows_copy = optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (v, rows))
            returned = loss(v_copy, rows_copy)
            if not isinstance(returned, tuple) or len(returned) != 2:
                got = type(returned).__name__
                raise UsageError(f"method {method.method_name} returned {got} as loss, expected (loss, diagnostics)")
            check_loss(method, *returned, len(rows.level))
            return returned

        return call_checked

    return check


def check_loss(method: Method, loss: Any, info: Any, items: int) -> None:
    """Raise UsageError unless loss and diagnostics have one number per item; other shapes would broadcast silently."""
    name = method.method_name
    if _shape(loss) != [items]:
        raise UsageError(f"method {name} returned a loss of {_describe(loss)}, expected [{items}], one number per item")
    if not isinstance(info, tuple) or not getattr(info, "_fields", ()):
        got = type(info).__name__
        raise UsageError(f"method {name} returned diagnostics of type {got}, expected a NamedTuple of tensors [{items}]")
    if method.needs.ratio and "log_ratio" not in info._fields:  # type: ignore[attr-defined]
        raise UsageError(f"method {name} returned no diagnostic log_ratio, which Needs(ratio=True) requires")
    for field, value in zip(info._fields, info, strict=True):  # type: ignore[attr-defined]
        if _shape(value) != [items]:
            raise UsageError(f"method {name} returned a diagnostic {field} of {_describe(value)}, expected [{items}]")


def _shape(value: Any) -> list[int] | str:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _describe(value: Any) -> str:
    return f"{'shape' if isinstance(value, Tensor) else 'type'} {_shape(value)}"
