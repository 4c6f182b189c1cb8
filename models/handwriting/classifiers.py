"""Classifiers of single digits: fitted by scikit-learn, stored in files, and evaluated without it.

Importing scikit-learn takes about 1.5 s of CPU time per process, and fitting the trees another one. Each classifier here
returns the classes that its counterpart in scikit-learn returns.
"""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

CLASSES = 10


class Machine(NamedTuple):
    """Support-vector machine with an RBF kernel; each pair of classes votes, as in libsvm."""

    vectors: Tensor  # [S, 64] support vectors, sorted by class
    coefficients: Tensor  # [S, 45] of each vector in the decision of each pair of classes, float64
    intercepts: Tensor  # [45] float64
    gamma: Tensor  # [] float64

    @classmethod
    def of(cls, fitted: Any) -> Self:
        """Return a fitted `sklearn.svm.SVC`."""
        starts = np.cumsum([0, *fitted.n_support_])
        coefficients = np.zeros((len(fitted.support_), len(fitted._intercept_)))
        for pair, (i, j) in enumerate(zip(*np.triu_indices(CLASSES, 1), strict=True)):
            for own, other in ((i, j - 1), (j, i)):  # libsvm keeps a vector's coefficients without its own class
                rows = slice(starts[own], starts[own + 1])
                coefficients[rows, pair] = fitted._dual_coef_[other, rows]
        parts = coefficients, fitted._intercept_, np.float64(fitted._gamma)
        return cls(torch.tensor(fitted.support_vectors_, dtype=torch.float32), *map(torch.tensor, parts))

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: that with most votes, of several the lowest.

        Classes i < j: i has the vote of the pair if sum_s coefficient_s exp(-gamma |x - s|^2) + intercept > 0, else j has.
        """
        x = torch.from_numpy(pixels).to(torch.float64)
        kernel = torch.exp(-self.gamma * compute_distances(x, self.vectors.to(torch.float64)))
        first, second = torch.triu_indices(CLASSES, CLASSES, 1)
        winner = torch.where(kernel @ self.coefficients + self.intercepts > 0, first, second)
        return find_winner(torch.nn.functional.one_hot(winner, CLASSES).sum(1))


class Neighbours(NamedTuple):
    """The 3 nearest known digits, each with the inverse of its distance as the weight of its vote."""

    pixels: Tensor  # [K, 64]
    labels: Tensor  # [K]

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: that with the largest sum of weights."""
        squared = compute_distances(torch.from_numpy(pixels).to(torch.float64), self.pixels.to(torch.float64))
        nearest, which = squared.topk(3, largest=False)
        weight = 1 / nearest.clamp(min=1e-300).sqrt()  # a digit at distance 0 outweighs all others
        votes = torch.zeros(len(pixels), CLASSES, dtype=torch.float64)
        return find_winner(votes.scatter_add(1, self.labels[which], weight))


class Trees(NamedTuple):
    """Decision trees, grown until a leaf has one class; each tree has a vote. K nodes in all.

    A node's left child follows it.
    """

    feature: Tensor  # [K] index of the pixel that a node compares; of a leaf -1 - its class, int8
    threshold: Tensor  # [K] the left child if the pixel is at most this, float32
    right: Tensor  # [K] index of the right child relative to the node, int16
    roots: Tensor  # [T] index of each tree's first node, int32

    @classmethod
    def of(cls, fitted: Any) -> Self:
        """Return a fitted `sklearn.ensemble.ExtraTreesClassifier`."""
        trees = [each.tree_ for each in fitted.estimators_]
        leaf = np.concatenate([tree.children_left for tree in trees]) < 0
        label = np.concatenate([tree.value[:, 0].argmax(1) for tree in trees])
        threshold = np.concatenate([tree.threshold for tree in trees])
        rounded = threshold.astype(np.float32)
        # Pixels are float32: one is at most a number if it is at most the next float32 below it.
        rounded = np.where(rounded > threshold, np.nextafter(rounded, np.float32(-np.inf)), rounded)
        right = np.concatenate([tree.children_right - np.arange(tree.node_count) for tree in trees])
        return cls(
            torch.tensor(np.where(leaf, -1 - label, np.concatenate([tree.feature for tree in trees])), dtype=torch.int8),
            torch.tensor(np.where(leaf, np.float32(0), rounded)),
            torch.tensor(np.where(leaf, 0, right), dtype=torch.int16),
            torch.tensor(np.cumsum([0, *(tree.node_count for tree in trees)])[:-1], dtype=torch.int32),
        )

    def predict(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class of each row `[N, 64]`, int64 `[N]`: that with most votes, of several the lowest."""
        feature, threshold, right = (part.numpy() for part in (self.feature, self.threshold, self.right))
        node = np.broadcast_to(self.roots.numpy(), (len(pixels), len(self.roots))).ravel()
        row = np.repeat(np.arange(len(pixels)), len(self.roots))
        leaves = np.empty(node.shape, np.int64)
        inside = np.arange(len(node))  # pairs of a row and a tree that are not yet at a leaf
        while len(inside):
            compared = feature[node]
            leaf = compared < 0
            leaves[inside[leaf]] = -1 - compared[leaf].astype(np.int64)
            inside, node, row, compared = inside[~leaf], node[~leaf], row[~leaf], compared[~leaf]
            node = node + np.where(pixels[row, compared] <= threshold[node], 1, right[node])
        votes = leaves.reshape(len(pixels), -1)
        return find_winner(torch.stack([torch.from_numpy((votes == label).sum(1)) for label in range(CLASSES)], dim=1))


def compute_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y|^2 of each pair of rows, `[N, M]`."""
    return (x.square().sum(1)[:, None] - 2 * x @ y.T + y.square().sum(1)).clamp(min=0)


def find_winner(votes: Tensor) -> np.ndarray:
    """Return the class with most votes `[N, 10]`, of several the lowest, int64 `[N]`."""
    return votes.numpy().argmax(1)
