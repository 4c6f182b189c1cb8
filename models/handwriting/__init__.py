"""The built-in models: handwriting of 4-digit codes, small enough to train on a laptop."""

from fluvial.models.handwriting.data import codes, digits, write
from fluvial.models.handwriting.model import BASE, Handwriting
from fluvial.models.handwriting.recognisers import Reader, evaluation_reader, reward_reader
from fluvial.models.handwriting.unet import BASE_UNET, HandwritingUNet

__all__ = [
    "BASE",
    "BASE_UNET",
    "Handwriting",
    "HandwritingUNet",
    "Reader",
    "codes",
    "digits",
    "evaluation_reader",
    "reward_reader",
    "write",
]
