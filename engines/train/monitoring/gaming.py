"""Reward hacking as it happens: an unseen evaluator falls from evaluation to evaluation while the reward rises."""

from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from fluvial.engines.evaluation.evaluate import Evaluation

UNSEEN = "heldout"  # name of the evaluator that training never sees


class Point(NamedTuple):
    """An evaluation during a run."""

    update: int
    score: float  # mean score by the evaluator
    reward: float  # mean reward of the rollouts since the evaluation before


class Watch:
    """Evaluations of a run so far, and the rewards since the last one.

    The evaluation before training is not one of them, because it takes other samples.

    Args:
        known: update, score and reward of each evaluation; a list that checkpoints hold.
        recent: mean reward of each rollout since the last evaluation; likewise.
    """

    def __init__(self, known: list[list[float]], recent: list[float]) -> None:
        self.known, self.recent = known, recent

    @property
    def points(self) -> list[Point]:
        """Evaluations so far."""
        return [Point(int(update), score, reward) for update, score, reward in self.known]

    def add(self, update: int, score: float) -> None:
        """Note an evaluation."""
        if self.recent:
            self.known.append([update, score, fmean(self.recent)])
            self.recent.clear()

    @property
    def best(self) -> Point | None:
        """The evaluation with the highest score, of equal ones the first; None before the first evaluation."""
        return max(self.points, key=lambda point: point.score, default=None)

    def gamed(self, count: int) -> list[Point]:
        """Return the last evaluations if the score fell from each to the next, `count` times, while the reward rose.

        Otherwise none are returned. The reward rose if it is higher before the last of them than before the first.
        """
        last = self.points[-count - 1 :]
        fell = len(last) > count and all(after.score < before.score for before, after in pairwise(last))
        return last if count > 0 and fell and last[-1].reward > last[0].reward else []


def evaluator_of(names: tuple[str, ...]) -> str:
    """Return the evaluator that is watched: the one that training never sees, or the last."""
    return UNSEEN if UNSEEN in names else names[-1]


def score_of(evaluation: Evaluation) -> float:
    """Return the mean score by the evaluator that is watched."""
    return evaluation.score[evaluator_of(tuple(evaluation.score))]


def described(points: list[Point], evaluator: str) -> str:
    """Return what happened over the evaluations that `Watch.gamed` found."""
    scores = " > ".join(f"{point.score:.3f}" for point in points)
    return (
        f"the score of the {evaluator} evaluator fell at {len(points) - 1} evaluations in a row ({scores}) while the reward "
        f"rose from {points[0].reward:.3f} to {points[-1].reward:.3f}"
    )
