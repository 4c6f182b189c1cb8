"""Objectives by name, custom ones included."""

import dataclasses
import inspect
from functools import cached_property
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError
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
METHODS = {"target_weight": ("reward", "advantage", "group"), "loss": ("v", "items", "config")}
GATHERING = ("statistic", "gathered")


def objective_type(name: str) -> type[Objective]:
    """Return the class of an objective: of the table, of an entry point of `fluvial.objectives`, or `module:Class`.

    Raises:
        UsageError: there is no such class, or it is not an objective.
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
