"""Models: one adapter an architecture, and LoRA through PEFT."""

from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.protocol import Cond, Prediction, Schedule, VelocityModel, is_recorded

__all__ = ["Cond", "LoraConfig", "Prediction", "Schedule", "VelocityModel", "add_lora", "is_recorded"]
