"""Built-in models of drawn words, read by OCR models that people use: one draws them, one corrects them."""

from fluvial.models.words.edits import EDIT_BASE, EditWords, correct, misspelt_images, unchanged
from fluvial.models.words.model import BASE, Words, words, write
from fluvial.models.words.recognisers import WordRecogniser, heldout_recogniser, legibility, reward_recogniser

__all__ = [
    "BASE",
    "EDIT_BASE",
    "EditWords",
    "WordRecogniser",
    "Words",
    "correct",
    "heldout_recogniser",
    "legibility",
    "misspelt_images",
    "reward_recogniser",
    "unchanged",
    "words",
    "write",
]
