"""Objectives by name, and the checks of custom ones: of their class, of every result, and of what they raise."""

import dataclasses
import inspect
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.methods.alignprop import AlignProp
from fluvial.engines.methods.crd import Crd
from fluvial.engines.methods.losses import LossConfig
from fluvial.engines.methods.matching import Awm, Distill, Raft, Sft
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.preferences import D3po, Dgpo, Dpo
from fluvial.engines.methods.protocol import Objective, ObjectiveTraits
from fluvial.engines.methods.surrogates import Clipped, Dppo, Guard, TempFlow

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


def checked(objective: Objective) -> Objective:
    """Return a custom objective with its calls checked, a built-in one as it is."""
    return objective if type(objective) in OBJECTIVES.values() else Checked(objective)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A custom objective whose calls name it in an error, and raise for a result of a wrong shape."""

    objective: Any  # with the methods of `Gathering` if its traits say so

    @property
    def traits(self) -> ObjectiveTraits:
        """Traits of the objective."""
        traits: ObjectiveTraits = self.objective.traits
        return traits

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return each sample's target weight; UsageError unless there is a finite number per sample."""
        weight: Tensor = self._called("target_weight", reward, advantage, group)
        name, got, samples = name_of(self.objective), _shape(weight), len(reward)
        if got != [samples]:
            raise UsageError(
                f"objective {name} returned a target_weight of {got}, expected [{samples}], a number per sample"
            )
        if not bool(torch.isfinite(weight).all()):
            raise UsageError(f"objective {name} returned a target_weight that is not finite, expected finite numbers")
        return weight

    def statistic(self, v: Tensor, items: Any) -> Tensor:
        """Return the statistic of each item."""
        statistic: Tensor = self._called("statistic", v, items)
        return statistic

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return what the loss of each item reads of the other samples."""
        context: Tensor = self._called("gathered", statistic, target_weight, group, counts)
        return context

    def loss(self, v: Tensor, items: Any, config: LossConfig) -> tuple[Tensor, Any]:
        """Return loss and diagnostics; UsageError unless they are a number per item, and a NamedTuple of such numbers."""
        loss, info = self._called("loss", v, items, config)
        check_loss(self.objective, loss, info, len(items.level))
        return loss, info

    def _called(self, method: str, *args: Any) -> Any:
        """Return a method's result; an exception becomes a RunError of one line that names objective and method."""
        try:
            # Copies, so that what it does in place changes neither the run's tensors nor those of the backward pass.
            own = optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)
            return getattr(self.objective, method)(*own)
        except FluvialError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise RunError(
                f"objective {name_of(self.objective)} raised {type(error).__name__} in {method}: {said}"
            ) from error


def check_loss(objective: Objective, loss: Any, info: Any, items: int) -> None:
    """Raise UsageError unless an objective returned a number per item, and a NamedTuple of such diagnostics.

    Other shapes would broadcast silently.
    """
    name = name_of(objective)
    if _shape(loss) != [items]:
        raise UsageError(f"objective {name} returned a loss of {_described(loss)}, expected [{items}], one number per item")
    if not isinstance(info, tuple) or not getattr(info, "_fields", ()):
        got = type(info).__name__
        raise UsageError(f"objective {name} returned diagnostics of type {got}, expected a NamedTuple of tensors [{items}]")
    for field, value in zip(info._fields, info, strict=True):  # type: ignore[attr-defined]
        if _shape(value) != [items]:
            raise UsageError(f"objective {name} returned a diagnostic {field} of {_described(value)}, expected [{items}]")


def _shape(value: Any) -> list[int] | str:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _described(value: Any) -> str:
    return f"{'shape' if isinstance(value, Tensor) else 'type'} {_shape(value)}"
