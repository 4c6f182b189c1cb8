"""Objectives: one file per family, and the table of them.

An own objective is a frozen dataclass with `traits`, `target_weight` and `loss`, see `protocol.Objective`.
"""

from fluvial.engines.methods.losses import ErrorInfo, LossConfig
from fluvial.engines.methods.protocol import Objective, ObjectiveTraits
from fluvial.engines.methods.table import OBJECTIVES

__all__ = ["OBJECTIVES", "ErrorInfo", "LossConfig", "Objective", "ObjectiveTraits"]
