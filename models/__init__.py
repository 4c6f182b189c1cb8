"""Models: their protocol, adapters over diffusers, the built-in models and LoRA.

The names below are imported on first use, so that `models.catalogue` can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluvial.models.lora import LoraConfig, add_lora
    from fluvial.models.pipelines.open import load_adapter, open_model
    from fluvial.models.protocol import (
        Cond,
        DiffusionModel,
        Prediction,
        Schedule,
        check_model,
        decode_samples,
        is_recorded,
        knows_any_level,
    )

__all__ = [
    "Cond",
    "DiffusionModel",
    "LoraConfig",
    "Prediction",
    "Schedule",
    "add_lora",
    "check_model",
    "decode_samples",
    "is_recorded",
    "knows_any_level",
    "load_adapter",
    "open_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"LoraConfig": "lora", "add_lora": "lora", "load_adapter": "pipelines.open", "open_model": "pipelines.open"}
    return getattr(importlib.import_module(f"{__name__}.{module.get(name, 'protocol')}"), name)
