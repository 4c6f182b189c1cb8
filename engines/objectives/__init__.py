"""Objectives: one file per family, and the table of them.

An own objective is a frozen dataclass with `traits`, `target_weight` and `loss`, see `protocol.Objective`.
"""

from fluvial.engines.objectives.losses import ErrorInfo, LossConfig
from fluvial.engines.objectives.protocol import Objective, ObjectiveTraits
from fluvial.engines.objectives.table import OBJECTIVES

__all__ = ["OBJECTIVES", "ErrorInfo", "LossConfig", "Objective", "ObjectiveTraits"]
