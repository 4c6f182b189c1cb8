"""Methods: one file per family, and the table of them; for one of your own see `run.method.Method`."""

from fluvial.engines.methods.losses import ErrorInfo, KLConfig, StepKLConfig
from fluvial.engines.methods.table import METHODS
from fluvial.engines.run.method import (
    EpochsConfig,
    Images,
    Method,
    Needs,
    NoisedRows,
    PassesConfig,
    Preferences,
    RecordedRows,
)

__all__ = [
    "METHODS",
    "EpochsConfig",
    "ErrorInfo",
    "Images",
    "KLConfig",
    "Method",
    "Needs",
    "NoisedRows",
    "PassesConfig",
    "Preferences",
    "RecordedRows",
    "StepKLConfig",
]
