"""Recognisers of handwritten codes, of different model families and fitted on different digits.

`reward_recogniser` (a support-vector machine and nearest neighbours, fitted on the training half) scores rollouts.
`heldout_recogniser` (extremely randomised trees, fitted on the other half) only ever evaluates, so that learning to please
the first recogniser instead of writing well shows.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC
from torch import Tensor

from fluvial.models.handwriting.data import DIGITS, SIZE, as_digits, digits


class Classifier(Protocol):
    """The part of a scikit-learn classifier that is used."""

    def predict(self, X: np.ndarray) -> np.ndarray: ...


class Recogniser:
    """Reads codes from images `[B, 1, 8, 32]` in [0, 1] with one or more classifiers of single digits."""

    def __init__(self, *classifiers: Classifier) -> None:
        self.classifiers = classifiers

    def read(self, images: Tensor) -> Tensor:
        """Return the digits that each classifier reads, int64 `[classifiers, B, 4]`."""
        single = images.reshape(-1, SIZE, DIGITS, SIZE).permute(0, 2, 1, 3).reshape(-1, SIZE * SIZE)
        if len(single) == 0:
            return torch.empty(len(self.classifiers), 0, DIGITS, dtype=torch.int64)
        flat = single.cpu().float().numpy()
        return torch.stack([torch.from_numpy(c.predict(flat)).reshape(-1, DIGITS) for c in self.classifiers])

    def each(self) -> tuple["Recogniser", ...]:
        """Return a recogniser for each of the classifiers."""
        return tuple(Recogniser(classifier) for classifier in self.classifiers)

    def characters(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the fraction of characters read as asked, float32 `[B]`: the OCR score of the text-rendering papers.

        It is the mean over the classifiers, and 1 if all of them read all characters so.
        """
        return (self.read(images) == as_digits(prompts)).to(torch.float32).mean((0, 2))


@cache
def reward_recogniser() -> Recogniser:
    """Return the recogniser that scores rollouts: an RBF support-vector machine and 3 nearest neighbours.

    Either can be pleased by images that nobody else reads, but hardly both by the same: what one decides by distant
    support vectors, the other decides by the nearest real digits.
    """
    half = digits("training")
    machine, neighbours = SVC(C=10.0, gamma=0.08), KNeighborsClassifier(3, weights="distance")
    return Recogniser(*(classifier.fit(_flat(half.pixels), half.labels.numpy()) for classifier in (machine, neighbours)))


@cache
def heldout_recogniser() -> Recogniser:
    """Return the recogniser that training never sees: 400 extremely randomised trees fitted on the evaluation half."""
    half = digits("evaluation")
    return Recogniser(ExtraTreesClassifier(400, random_state=0).fit(_flat(half.pixels), half.labels.numpy()))


def _flat(pixels: Tensor) -> np.ndarray:
    """Return digits as a recogniser sees them: rows of 64 values in [0, 1]."""
    return ((pixels + 1) / 2).reshape(-1, SIZE * SIZE).numpy()
