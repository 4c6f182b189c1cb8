"""Recognisers of handwritten codes: one for the reward, and an independent one for the evaluation.

`load_reward_recogniser` (a support-vector machine and nearest neighbours, fitted on the training half) scores rollouts.
`load_heldout_recogniser` (extremely randomised trees, fitted on the other half) is used for evaluation only. The two share
neither data nor model family, so that reward hacking shows in the evaluation. Classifiers are fitted with scikit-learn,
stored in files, and evaluated without it, because its import takes 1.5 s of CPU time; they return the same classes.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.models.handwriting.data import DIGITS, SIZE, Digits, load_digits, to_digits

CLASSES = 10


class SupportVectorMachine(NamedTuple):
    """Support-vector machine with an RBF kernel; each pair of classes votes, as in libsvm."""

    vectors: Tensor  # [S, 64] support vectors, sorted by class
    coefficients: Tensor  # [S, 45] coefficient of each vector in the decision of each pair of classes, float64
    intercepts: Tensor  # [45] float64
    gamma: Tensor  # [] float64

    @classmethod
    def from_sklearn(cls, fitted: Any) -> Self:
        """Convert a fitted `sklearn.svm.SVC`."""
        starts = np.cumsum([0, *fitted.n_support_])
        coefficients = np.zeros((len(fitted.support_), len(fitted._intercept_)))
        for pair, (i, j) in enumerate(zip(*np.triu_indices(CLASSES, 1), strict=True)):
            for first, other in ((i, j - 1), (j, i)):  # libsvm keeps a vector's coefficients without its own class
                rows = slice(starts[first], starts[first + 1])
                coefficients[rows, pair] = fitted._dual_coef_[other, rows]
        parts = coefficients, fitted._intercept_, np.float64(fitted._gamma)
        return cls(torch.tensor(fitted.support_vectors_, dtype=torch.float32), *map(torch.tensor, parts))

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: the class with most votes, the lowest on a tie.

        The pair i < j votes for i if sum_s coefficient_s exp(-gamma |x - s|^2) + intercept > 0, else for j.
        """
        x = torch.from_numpy(pixels).to(torch.float64)
        kernel = torch.exp(-self.gamma * compute_squared_distances(x, self.vectors.to(torch.float64)))
        first, second = torch.triu_indices(CLASSES, CLASSES, 1)
        winner = torch.where(kernel @ self.coefficients + self.intercepts > 0, first, second)
        return choose_winner(torch.nn.functional.one_hot(winner, CLASSES).sum(1))


class NearestNeighbours(NamedTuple):
    """Classifier by the 3 nearest known digits, whose votes are weighted by the inverse distance."""

    pixels: Tensor  # [K, 64]
    labels: Tensor  # [K]

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: the class with the largest sum of weights."""
        squared = compute_squared_distances(torch.from_numpy(pixels).to(torch.float64), self.pixels.to(torch.float64))
        nearest, which = squared.topk(3, largest=False)
        weight = 1 / nearest.clamp(min=1e-300).sqrt()  # a digit at distance 0 outweighs all others
        votes = torch.zeros(len(pixels), CLASSES, dtype=torch.float64)
        return choose_winner(votes.scatter_add(1, self.labels[which], weight))


class ExtraTrees(NamedTuple):
    """Decision trees with K nodes in all, grown until each leaf has one class; each tree has a vote.

    A node's left child follows it.
    """

    feature: Tensor  # [K] index of the pixel that a node compares; -1 - class at a leaf, int8
    threshold: Tensor  # [K] largest pixel that leads to the left child, float32
    right: Tensor  # [K] index of the right child relative to the node, int16
    roots: Tensor  # [T] index of each tree's first node, int32

    @classmethod
    def from_sklearn(cls, fitted: Any) -> Self:
        """Convert a fitted `sklearn.ensemble.ExtraTreesClassifier`."""
        trees = [each.tree_ for each in fitted.estimators_]
        leaf = np.concatenate([tree.children_left for tree in trees]) < 0
        label = np.concatenate([tree.value[:, 0].argmax(1) for tree in trees])
        threshold = np.concatenate([tree.threshold for tree in trees])
        rounded = threshold.astype(np.float32)
        # Pixels are float32: a pixel is at most a float64 threshold if it is at most the next float32 below.
        rounded = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
        right = np.concatenate([tree.children_right - np.arange(tree.node_count) for tree in trees])
        return cls(
            torch.tensor(np.where(leaf, -1 - label, np.concatenate([tree.feature for tree in trees])), dtype=torch.int8),
            torch.tensor(np.where(leaf, np.float32(0), rounded)),
            torch.tensor(np.where(leaf, 0, right), dtype=torch.int16),
            torch.tensor(np.cumsum([0, *(tree.node_count for tree in trees)])[:-1], dtype=torch.int32),
        )

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: the class with most votes, the lowest on a tie."""
        feature, threshold, right = (part.numpy() for part in (self.feature, self.threshold, self.right))
        node = np.broadcast_to(self.roots.numpy(), (len(pixels), len(self.roots))).ravel()
        row = np.repeat(np.arange(len(pixels)), len(self.roots))
        leaves = np.empty(node.shape, np.int64)
        active = np.arange(len(node))  # pairs of a row and a tree that are not yet at a leaf
        while len(active):
            pixel = feature[node]
            leaf = pixel < 0
            leaves[active[leaf]] = -1 - pixel[leaf].astype(np.int64)
            active, node, row, pixel = active[~leaf], node[~leaf], row[~leaf], pixel[~leaf]
            node = node + np.where(pixels[row, pixel] <= threshold[node], 1, right[node])
        votes = leaves.reshape(len(pixels), -1)
        return choose_winner(torch.stack([torch.from_numpy((votes == label).sum(1)) for label in range(CLASSES)], dim=1))


def compute_squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y|^2 of each pair of rows, `[N, M]`."""
    return (x.square().sum(1)[:, None] - 2 * x @ y.T + y.square().sum(1)).clamp(min=0)


def choose_winner(votes: Tensor) -> np.ndarray:
    """Return the class with most votes `[N, 10]`, the lowest on a tie, int64 `[N]`."""
    return votes.numpy().argmax(1)


FITTED = Path(__file__).parent / "fitted"  # the classifiers' parameters, see `fit`


class DigitRecogniser:
    """Recogniser of codes in images `[B, 1, 8, 32]` in [0, 1], with classifiers of single digits."""

    def __init__(self, *classifiers: Any) -> None:
        self.classifiers = classifiers

    def read(self, images: Tensor) -> Tensor:
        """Return the digits that each classifier recognises, int64 `[classifiers, B, 4]`."""
        single = images.reshape(-1, SIZE, DIGITS, SIZE).permute(0, 2, 1, 3).reshape(-1, SIZE * SIZE)
        if len(single) == 0:
            return torch.empty(len(self.classifiers), 0, DIGITS, dtype=torch.int64)
        flat = single.cpu().float().numpy()
        return torch.stack([torch.from_numpy(c.predict(flat)).reshape(-1, DIGITS) for c in self.classifiers])

    def split(self) -> tuple["DigitRecogniser", ...]:
        """Return one recogniser per classifier."""
        return tuple(DigitRecogniser(classifier) for classifier in self.classifiers)

    def characters(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the fraction of correct characters, float32 `[B]`: the OCR score of the text-rendering papers.

        The mean over the classifiers is 1 if all of them recognise all characters of the prompt.
        """
        return (self.read(images) == to_digits(prompts)).to(torch.float32).mean((0, 2))


def likeness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the mean log-probability of the prompt's characters, float32 `[B]`; gradients flow to the images.

    The density of a class is the kernel density of its training digits, with Gaussian kernels of variance 1 / 4.
    """
    half = load_digits("training")
    single = images.reshape(-1, SIZE, DIGITS, SIZE).permute(0, 2, 1, 3).reshape(-1, SIZE * SIZE)
    known = (half.pixels.reshape(-1, SIZE * SIZE).to(single.device, torch.float32) + 1) / 2
    squared = torch.cdist(single.float(), known) ** 2
    labels = half.labels.to(single.device)
    classes = torch.stack([torch.logsumexp(-2 * squared[:, labels == digit], dim=1) for digit in range(10)], dim=1)
    digits = to_digits(prompts).to(single.device).reshape(-1, 1)
    return classes.log_softmax(1).gather(1, digits).reshape(-1, DIGITS).mean(1)


@cache
def load_reward_recogniser() -> DigitRecogniser:
    """Return the recogniser of the reward: an RBF support-vector machine and 3 nearest neighbours, of the training half.

    Illegible images can fool either alone. Images that fool both are much rarer, because one decides by distant support
    vectors and the other by the nearest real digits.
    """
    half = load_digits("training")
    return DigitRecogniser(
        SupportVectorMachine(**load_file(FITTED / "machine.safetensors")),
        NearestNeighbours(flatten_digits(half), half.labels.long()),
    )


@cache
def load_heldout_recogniser() -> DigitRecogniser:
    """Return the recogniser of the evaluation: 400 extremely randomised trees fitted on the evaluation half."""
    return DigitRecogniser(ExtraTrees(**load_file(FITTED / "trees.safetensors")))


def fit(folder: Path) -> None:
    """Fit the classifiers with scikit-learn and write those with parameters to a folder, as the shipped files were."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.svm import SVC

    training, evaluation = load_digits("training"), load_digits("evaluation")
    machine = SVC(C=10.0, gamma=0.08).fit(flatten_digits(training).numpy(), training.labels.numpy())
    trees = ExtraTreesClassifier(400, random_state=0).fit(flatten_digits(evaluation).numpy(), evaluation.labels.numpy())
    save_file(SupportVectorMachine.from_sklearn(machine)._asdict(), folder / "machine.safetensors")
    save_file(ExtraTrees.from_sklearn(trees)._asdict(), folder / "trees.safetensors")


def flatten_digits(half: Digits) -> Tensor:
    """Return digits as rows of 64 values in [0, 1], the input of the classifiers."""
    return ((half.pixels + 1) / 2).reshape(-1, SIZE * SIZE)
