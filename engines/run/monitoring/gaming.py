"""Reward hacking as it happens: an unseen evaluator falls from evaluation to evaluation while the reward rises."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

UNSEEN = "heldout"  # name of the evaluator that training never sees


class Point(NamedTuple):
    """An evaluation during a run; the one before training is not one, because it takes other samples."""

    update: int
    score: float  # mean score by the evaluator
    reward: float  # mean reward of the rollouts since the evaluation before


def best_of(points: Sequence[Point]) -> Point | None:
    """Return the evaluation with the highest score, of equal ones the first; None before the first evaluation."""
    return max(points, key=lambda point: point.score, default=None)


def find_gaming(points: Sequence[Point], count: int) -> Sequence[Point]:
    """Return the last evaluations if the score fell from each to the next, `count` times, while the reward rose.

    Otherwise none are returned. The reward rose if it is higher before the last of them than before the first.
    """
    last = points[-count - 1 :]
    fell = len(last) > count and all(after.score < before.score for before, after in pairwise(last))
    return last if count > 0 and fell and last[-1].reward > last[0].reward else ()


def evaluator_of(names: Sequence[str]) -> str:
    """Return the evaluator that is watched: the one that training never sees, or the last."""
    return UNSEEN if UNSEEN in names else names[-1]


def describe_gaming(points: Sequence[Point], evaluator: str) -> str:
    """Return what happened over the evaluations that `find_gaming` found."""
    scores = " > ".join(f"{point.score:.3f}" for point in points)
    return (
        f"the score of the {evaluator} evaluator fell at {len(points) - 1} evaluations in a row ({scores}) while the reward "
        f"rose from {points[0].reward:.3f} to {points[-1].reward:.3f}"
    )
