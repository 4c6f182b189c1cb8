"""The objectives by name, a person's own included."""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.objectives.alignprop import AlignProp
from fluvial.engines.objectives.awm import Awm
from fluvial.engines.objectives.clipped import Clipped
from fluvial.engines.objectives.crd import Crd
from fluvial.engines.objectives.d3po import D3po
from fluvial.engines.objectives.dgpo import Dgpo
from fluvial.engines.objectives.distill import Distill
from fluvial.engines.objectives.dpo import Dpo
from fluvial.engines.objectives.dppo import Dppo
from fluvial.engines.objectives.guard import Guard
from fluvial.engines.objectives.nft import Nft
from fluvial.engines.objectives.protocol import Objective, ObjectiveTraits
from fluvial.engines.objectives.raft import Raft
from fluvial.engines.objectives.sft import Sft
from fluvial.engines.objectives.tempflow import TempFlow

OBJECTIVES: dict[str, type] = {
    "clipped": Clipped,
    "guard": Guard,
    "dppo": Dppo,
    "distill": Distill,
    "nft": Nft,
    "awm": Awm,
    "raft": Raft,
    "sft": Sft,
    "dpo": Dpo,
    "dgpo": Dgpo,
    "crd": Crd,
    "tempflow": TempFlow,
    "d3po": D3po,
    "alignprop": AlignProp,
}
METHODS = {"target_weight": ("reward", "advantage", "group"), "loss": ("v", "items", "transition", "config")}
GATHERING = ("statistic", "gathered")


def objective_type(name: str) -> type[Objective]:
    """Return the class of an objective: of the table, of an entry point of `fluvial.objectives`, or `module:Class`.

    Raises:
        UsageError: there is no such class, or it is no objective.
    """
    return plugins.load(name, "objectives", _problem, table=OBJECTIVES)


def name_of(objective: Objective) -> str:
    """Return the name under which `objective_type` finds an objective's class."""
    kind = type(objective)
    return next((name for name, known in OBJECTIVES.items() if kind is known), None) or plugins.spec_of(kind)


def check_objective(objective: Any) -> None:
    """Raise UsageError unless an object is an objective."""
    kind = type(objective)
    if kind in OBJECTIVES.values():
        return
    if isinstance(objective, type):
        raise UsageError(f"objective is the class {objective.__name__}, expected an instance: {objective.__name__}()")
    if (problem := _problem(kind)) is not None:
        raise UsageError(f"objective {plugins.spec_of(kind)} {problem}")
    if not isinstance(objective.traits, ObjectiveTraits):
        got = type(objective.traits).__name__
        raise UsageError(f"objective {plugins.spec_of(kind)} has traits of type {got}, expected ObjectiveTraits")
    if objective.traits.gathers and (missing := [name for name in GATHERING if not hasattr(kind, name)]):
        raise UsageError(f"objective {plugins.spec_of(kind)} gathers statistics, and has no method {' and '.join(missing)}")


@contextmanager
def located(objective: Objective, method: str) -> Iterator[None]:
    """Turn an exception of a person's own objective into one line that names it; those of a built-in one are faults of ours.

    Raises:
        RunError: the method raised.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FluvialError) or type(objective) in OBJECTIVES.values():
            raise
        said = " ".join(str(error).split())
        raise RunError(f"objective {name_of(objective)} raised {type(error).__name__} in {method}: {said}") from error


def check_loss(objective: Objective, loss: Any, info: Any, items: int) -> None:
    """Raise UsageError unless an objective returned a number per item, and a NamedTuple of such diagnostics.

    Other shapes would broadcast silently.
    """
    name = name_of(objective)
    if not isinstance(loss, Tensor) or loss.shape != (items,):
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        raise UsageError(f"objective {name} returned a loss {shape}, expected [{items}], one number per item")
    if not isinstance(info, tuple) or not getattr(info, "_fields", ()):
        got = type(info).__name__
        raise UsageError(f"objective {name} returned diagnostics of type {got}, expected a NamedTuple of tensors [{items}]")
    for field, value in zip(info._fields, info, strict=True):  # type: ignore[attr-defined]
        if not isinstance(value, Tensor) or value.shape != (items,):
            shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise UsageError(f"objective {name} returned a diagnostic {field} {shape}, expected [{items}]")


def check_target_weight(objective: Objective, target_weight: Any, samples: int) -> None:
    """Raise UsageError unless an objective returned a finite number per sample."""
    name = name_of(objective)
    if not isinstance(target_weight, Tensor) or target_weight.shape != (samples,):
        got = list(target_weight.shape) if isinstance(target_weight, Tensor) else type(target_weight).__name__
        raise UsageError(f"objective {name} returned a target_weight of {got}, expected [{samples}], a number per sample")
    if not bool(torch.isfinite(target_weight).all()):
        raise UsageError(f"objective {name} returned a target_weight that is not finite, expected finite numbers")


def _problem(kind: Any) -> str | None:
    """Return what keeps a class from being an objective."""
    if not isinstance(kind, type):
        return f"is of type {type(kind).__name__}, expected a class"
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not a frozen dataclass: decorate it with @dataclass(frozen=True)"
    if not isinstance(getattr(kind, "traits", None), ObjectiveTraits | property | cached_property):
        return "has no traits: add `traits = ObjectiveTraits(trains_on=...)` to the class"
    for name, parameters in METHODS.items():
        method = getattr(kind, name, None)
        expected = f"{name}(self, {', '.join(parameters)})"
        if not callable(method):
            return f"has no method {expected}"
        try:
            inspect.signature(method).bind("self", *parameters)
        except TypeError as error:
            return f"has {name}{inspect.signature(method)}, expected {expected}: {error}"
    return None
