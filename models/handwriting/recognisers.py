"""Recognisers of handwritten codes: one for the reward, another one for the evaluation.

`reward_recogniser` (a support-vector machine and nearest neighbours, fitted on the training half) scores rollouts.
`heldout_recogniser` (extremely randomised trees, fitted on the other half) is used for evaluation only. The two share
neither data nor model family, so that gaming the reward shows in the evaluation.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.models.handwriting.classifiers import Machine, Neighbours, Trees
from fluvial.models.handwriting.data import DIGITS, SIZE, Digits, as_digits, digits

FITTED = Path(__file__).parent / "fitted"  # the classifiers' parameters, see `fit`


class Recogniser:
    """Recognise codes in images `[B, 1, 8, 32]` in [0, 1] with classifiers of single digits."""

    def __init__(self, *classifiers: Any) -> None:
        self.classifiers = classifiers

    def read(self, images: Tensor) -> Tensor:
        """Return the digits that each classifier recognises, int64 `[classifiers, B, 4]`."""
        single = images.reshape(-1, SIZE, DIGITS, SIZE).permute(0, 2, 1, 3).reshape(-1, SIZE * SIZE)
        if len(single) == 0:
            return torch.empty(len(self.classifiers), 0, DIGITS, dtype=torch.int64)
        flat = single.cpu().float().numpy()
        return torch.stack([torch.from_numpy(c.predict(flat)).reshape(-1, DIGITS) for c in self.classifiers])

    def each(self) -> tuple["Recogniser", ...]:
        """Return one recogniser per classifier."""
        return tuple(Recogniser(classifier) for classifier in self.classifiers)

    def characters(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the fraction of correct characters, float32 `[B]`: the OCR score of the text-rendering papers.

        It is averaged over the classifiers, so it is 1 if all of them recognise all characters of the prompt.
        """
        return (self.read(images) == as_digits(prompts)).to(torch.float32).mean((0, 2))


def likeness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the log-probability of the prompt's characters, float32 `[B]`, a mean over them; gradients flow to the images.

    Each class is the kernel density of its digits of the training half, with Gaussian kernels of variance 1 / 4.
    """
    half = digits("training")
    single = images.reshape(-1, SIZE, DIGITS, SIZE).permute(0, 2, 1, 3).reshape(-1, SIZE * SIZE)
    known = (half.pixels.reshape(-1, SIZE * SIZE).to(single.device, torch.float32) + 1) / 2
    squared = torch.cdist(single.float(), known) ** 2
    labels = half.labels.to(single.device)
    classes = torch.stack([torch.logsumexp(-2 * squared[:, labels == digit], dim=1) for digit in range(10)], dim=1)
    wanted = as_digits(prompts).to(single.device).reshape(-1, 1)
    return classes.log_softmax(1).gather(1, wanted).reshape(-1, DIGITS).mean(1)


@cache
def reward_recogniser() -> Recogniser:
    """Return the recogniser of the reward: an RBF support-vector machine and 3 nearest neighbours, of the training half.

    Either alone can be gamed by illegible images. An image that games both is much rarer, because one decides by distant
    support vectors and the other by the nearest real digits.
    """
    half = digits("training")
    return Recogniser(Machine(**load_file(FITTED / "machine.safetensors")), Neighbours(_pixels(half), half.labels.long()))


@cache
def heldout_recogniser() -> Recogniser:
    """Return the recogniser of the evaluation: 400 extremely randomised trees fitted on the evaluation half."""
    return Recogniser(Trees(**load_file(FITTED / "trees.safetensors")))


def fit(folder: Path) -> None:
    """Fit the classifiers with scikit-learn, and write those that have parameters to a folder, as the shipped files are."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.svm import SVC

    training, evaluation = digits("training"), digits("evaluation")
    machine = SVC(C=10.0, gamma=0.08).fit(_pixels(training).numpy(), training.labels.numpy())
    trees = ExtraTreesClassifier(400, random_state=0).fit(_pixels(evaluation).numpy(), evaluation.labels.numpy())
    save_file(Machine.of(machine)._asdict(), folder / "machine.safetensors")
    save_file(Trees.of(trees)._asdict(), folder / "trees.safetensors")


def _pixels(half: Digits) -> Tensor:
    """Return digits as rows of 64 values in [0, 1], the input of the classifiers."""
    return ((half.pixels + 1) / 2).reshape(-1, SIZE * SIZE)
