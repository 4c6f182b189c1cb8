"""Built-in models of handwritten 4-digit codes, small enough to train on a laptop."""

from fluvial.models.handwriting.data import codes, digits, write
from fluvial.models.handwriting.model import BASE, BASE_UNET, Handwriting, HandwritingUNet
from fluvial.models.handwriting.recognisers import DigitRecogniser, heldout_recogniser, likeness, reward_recogniser

__all__ = [
    "BASE",
    "BASE_UNET",
    "DigitRecogniser",
    "Handwriting",
    "HandwritingUNet",
    "codes",
    "digits",
    "heldout_recogniser",
    "likeness",
    "reward_recogniser",
    "write",
]
