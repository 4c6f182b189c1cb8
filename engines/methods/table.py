"""Methods by name, and the checks of custom ones: of their class, of every loss, and of what they raise."""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import optree
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.methods.alignprop import AlignProp
from fluvial.engines.methods.awm import Awm
from fluvial.engines.methods.crd import Crd
from fluvial.engines.methods.d3po import D3po
from fluvial.engines.methods.dgpo import Dgpo
from fluvial.engines.methods.distill import Distill
from fluvial.engines.methods.dpo import Dpo
from fluvial.engines.methods.grpo import Clipped
from fluvial.engines.methods.imitation import Raft, Sft
from fluvial.engines.methods.losses import LossConfig
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.protocol import Method, Objective, ObjectiveTraits
from fluvial.engines.methods.successors import Dppo, Guard, TempFlow
from fluvial.engines.run.declared import Loss

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
CALLS = {
    "networks": ("kl",),
    "collect": ("run", "key"),
    "learn": ("run", "batch", "key"),
    "loss": ("v", "rows", "config"),
}


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


def _problem(kind: Any) -> str | None:
    """Return what keeps a class from being an objective."""
    if not isinstance(kind, type):
        return f"is of type {type(kind).__name__}, expected a class"
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not a frozen dataclass: decorate it with @dataclass(frozen=True)"
    if not issubclass(kind, Method):
        return "is not a method: let it inherit from `fluvial.engines.methods.Method`"
    if not isinstance(getattr(kind, "traits", None), ObjectiveTraits | property | cached_property):
        return "has no traits: add `traits = ObjectiveTraits(trains_on=...)` to the class"
    for name, parameters in CALLS.items():
        method = getattr(kind, name)
        expected = f"{name}(self, {', '.join(parameters)})"
        if method is Method.learn:
            return f"has no method {expected}"
        try:
            inspect.signature(method).bind("self", *parameters)
        except TypeError as error:
            return f"has {name}{inspect.signature(method)}, expected {expected}: {error}"
    return None


def with_checked_loss(objective: Objective) -> Callable[[Loss], Loss]:
    """Return a function of a loss that returns it with its results checked; as it is for a built-in method."""
    if type(objective) in OBJECTIVES.values():
        return lambda loss: loss

    def check(loss: Loss) -> Loss:
        def call_checked(v: Tensor, rows: Any, config: LossConfig) -> tuple[Tensor, Any]:
            # Copies, so that what it does in place changes neither the run's tensors nor those of the backward pass.
            own, own_rows = optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (v, rows))
            found = loss(own, own_rows, config)
            if not isinstance(found, tuple) or len(found) != 2:
                got = type(found).__name__
                raise UsageError(f"objective {name_of(objective)} returned {got} as loss, expected (loss, diagnostics)")
            check_loss(objective, *found, len(rows.level))
            return found

        return call_checked

    return check


@contextmanager
def naming_errors(objective: Objective, call: str) -> Iterator[None]:
    """Turn an exception that is raised in the file of a custom method into a RunError of one line."""
    try:
        yield
    except FluvialError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = type(objective) not in OBJECTIVES.values() and inspect.getfile(type(objective))
        if not own or not frames or frames[-1].filename != own:
            raise
        said = " ".join(str(error).split())
        where = frames[-1].name if frames[-1].name in ("learn", "collect", "loss") else call
        raise RunError(f"objective {name_of(objective)} raised {type(error).__name__} in {where}: {said}") from error


def check_loss(objective: Objective, loss: Any, info: Any, items: int) -> None:
    """Raise UsageError unless an objective returned a number per item, and a NamedTuple of such diagnostics.

    Other shapes would broadcast silently.
    """
    name = name_of(objective)
    if _shape(loss) != [items]:
        raise UsageError(f"objective {name} returned a loss of {_describe(loss)}, expected [{items}], one number per item")
    if not isinstance(info, tuple) or not getattr(info, "_fields", ()):
        got = type(info).__name__
        raise UsageError(f"objective {name} returned diagnostics of type {got}, expected a NamedTuple of tensors [{items}]")
    for field, value in zip(info._fields, info, strict=True):  # type: ignore[attr-defined]
        if _shape(value) != [items]:
            raise UsageError(f"objective {name} returned a diagnostic {field} of {_describe(value)}, expected [{items}]")


def _shape(value: Any) -> list[int] | str:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _describe(value: Any) -> str:
    return f"{'shape' if isinstance(value, Tensor) else 'type'} {_shape(value)}"
