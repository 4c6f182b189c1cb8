"""Built-in models of drawn words for rewards of public OCR models: one draws words, one corrects them."""

from fluvial.models.words.edits import EDIT_BASE, EditWords, draw_corrections, draw_misspelt_words, unchanged
from fluvial.models.words.model import BASE, Words, draw_words, list_words
from fluvial.models.words.recognisers import WordRecogniser, legibility, load_heldout_recogniser, load_reward_recogniser

__all__ = [
    "BASE",
    "EDIT_BASE",
    "EditWords",
    "WordRecogniser",
    "Words",
    "draw_corrections",
    "draw_misspelt_words",
    "draw_words",
    "legibility",
    "list_words",
    "load_heldout_recogniser",
    "load_reward_recogniser",
    "unchanged",
]
