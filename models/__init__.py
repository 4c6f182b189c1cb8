"""Models: one adapter an architecture, and LoRA through PEFT."""

from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.protocol import Cond, DiffusionModel, Prediction, Schedule, is_recorded

__all__ = ["Cond", "DiffusionModel", "LoraConfig", "Prediction", "Schedule", "add_lora", "is_recorded"]
