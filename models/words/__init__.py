"""Built-in model of drawn words, read by OCR models that people use."""

from fluvial.models.words.data import words, write
from fluvial.models.words.model import BASE, Words
from fluvial.models.words.recognisers import Recogniser, heldout_recogniser, legibility, reward_recogniser

__all__ = ["BASE", "Recogniser", "Words", "heldout_recogniser", "legibility", "reward_recogniser", "words", "write"]
