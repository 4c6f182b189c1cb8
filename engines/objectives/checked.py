"""Custom objectives, called so that an error names the objective and a wrong result raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.objectives.losses import LossConfig
from fluvial.engines.objectives.protocol import Objective, ObjectiveTraits
from fluvial.engines.objectives.table import OBJECTIVES, name_of


def checked(objective: Objective) -> Objective:
    """Return a custom objective with its calls checked, a built-in one as it is."""
    return objective if type(objective) in OBJECTIVES.values() else Checked(objective)


@dataclass(frozen=True)
class Checked:
    """A custom objective with its calls checked.

    Args:
        objective: the objective, with the methods of `Gathering` if its traits say so.
    """

    objective: Any

    @property
    def traits(self) -> ObjectiveTraits:
        """Traits of the objective."""
        traits: ObjectiveTraits = self.objective.traits
        return traits

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return each sample's target weight; UsageError unless there is a finite number per sample."""
        with self._located("target_weight"):
            weight: Any = self.objective.target_weight(reward, advantage, group)
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
        with self._located("statistic"):
            statistic: Tensor = self.objective.statistic(v, items)
        return statistic

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return what the loss of each item reads of the other samples."""
        with self._located("gathered"):
            context: Tensor = self.objective.gathered(statistic, target_weight, group, counts)
        return context

    def loss(self, v: Tensor, items: Any, config: LossConfig) -> tuple[Tensor, Any]:
        """Return loss and diagnostics; UsageError unless they are a number per item, and a NamedTuple of such numbers."""
        with self._located("loss"):
            loss, info = self.objective.loss(v, items, config)
        check_loss(self.objective, loss, info, len(items.level))
        return loss, info

    @contextmanager
    def _located(self, method: str) -> Iterator[None]:
        """Turn an exception of the objective into a RunError of one line that names objective and method."""
        try:
            yield
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
