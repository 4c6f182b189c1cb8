"""Methods: one file per family, and the table of them; for one of your own see `protocol.Method`."""

from fluvial.engines.methods.losses import ErrorInfo, LossConfig
from fluvial.engines.methods.protocol import Method, Objective, ObjectiveTraits
from fluvial.engines.methods.table import OBJECTIVES

__all__ = ["OBJECTIVES", "ErrorInfo", "LossConfig", "Method", "Objective", "ObjectiveTraits"]
