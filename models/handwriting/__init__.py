"""Built-in models of handwritten 4-digit codes, small enough to train on a laptop."""

from fluvial.models.handwriting.data import draw_codes, list_codes, load_digits
from fluvial.models.handwriting.model import BASE, BASE_UNET, Handwriting, HandwritingUNet
from fluvial.models.handwriting.recognisers import DigitRecogniser, likeness, load_heldout_recogniser, load_reward_recogniser

__all__ = [
    "BASE",
    "BASE_UNET",
    "DigitRecogniser",
    "Handwriting",
    "HandwritingUNet",
    "draw_codes",
    "likeness",
    "list_codes",
    "load_digits",
    "load_heldout_recogniser",
    "load_reward_recogniser",
]
