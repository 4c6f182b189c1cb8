"""Statistics of scores: win rates, paired differences with a bootstrap interval, and pass rates."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES, AT_ONCE = 2000, 100


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Comparison(NamedTuple):
    """Comparison of scores with those of a base model on the same prompts and noise."""

    win_rate: float  # in [0, 1]; a tie counts one half
    difference: float  # mean of score - base, in the unit of the score
    interval: Interval  # of that mean, 95 %


class PassRates(NamedTuple):
    """Fractions of passed samples, in [0, 1]."""

    tags: dict[str, float]  # per tag
    overall: float  # mean over the tags (GenEval's overall score); over all samples if none has a tag
    samples: float  # over all samples
    prompts: float  # fraction of prompts with at least one passed sample


def compute_win_rate(scores: ArrayLike, base: ArrayLike) -> float:
    """Return the fraction of samples whose score is above that of the base; a tie counts one half.

    Args:
        scores, base: scores of the same prompts from the same noise, `[N]`.

    Raises:
        ValueError: there are no scores, or their numbers differ.
    """
    ours, theirs = _check_pair(scores, base)
    return float(np.mean((ours > theirs) + 0.5 * (ours == theirs)))


def bootstrap_interval(
    values: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the percentile bootstrap interval of a mean (Efron and Tibshirani 1993, chapter 13).

    Each resample draws as many clusters as there are, with replacement, and takes the mean of all their values. The interval
    lies between the (1 - level) / 2 and (1 + level) / 2 quantiles of these means.

    Args:
        values: numbers, `[N]`.
        clusters: cluster of each value, `[N]`, e.g. its prompt, because samples of one prompt are correlated. By default
            each value is its own cluster.
        level: nominal coverage of the interval.
        resamples: number of resamples.
        seed: seed of numpy's PCG64; the same seed gives the same interval.

    Raises:
        ValueError: there are no values, or `level` is not in (0, 1).
    """
    numbers = _as_array("values", values)
    if not 0 < level < 1:
        raise ValueError(f"bootstrap_interval: level is {level}, expected a number in (0, 1)")
    if resamples < 1:
        raise ValueError(f"bootstrap_interval: resamples is {resamples}, expected at least 1")
    ids = np.arange(len(numbers)) if clusters is None else _number_clusters(clusters)
    if len(ids) != len(numbers):
        raise ValueError(f"bootstrap_interval: got {len(ids)} clusters of {len(numbers)} values, expected one per value")
    sums, counts = np.bincount(ids, weights=numbers), np.bincount(ids)
    draws, means = np.random.default_rng(seed), list[np.ndarray]()
    for first in range(0, resamples, AT_ONCE):  # not all at once: N can be large
        drawn = draws.integers(len(sums), size=(min(AT_ONCE, resamples - first), len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def compare(scores: ArrayLike, base: ArrayLike, clusters: Sequence[object] | None = None) -> Comparison:
    """Return win rate, mean paired difference and its 95 % bootstrap interval.

    Args:
        scores, base: scores of the same prompts from the same noise, `[N]`.
        clusters: prompt of each sample, see `bootstrap_interval`.
    """
    ours, theirs = _check_pair(scores, base)
    differences = ours - theirs
    return Comparison(compute_win_rate(ours, theirs), float(differences.mean()), bootstrap_interval(differences, clusters))


def is_pass_fail(scores: ArrayLike) -> bool:
    """Return whether all scores are 0 or 1, as if each sample passed or failed a test."""
    numbers = _as_array("scores", scores)
    return bool(np.isin(numbers, (0.0, 1.0)).all())


def compute_pass_rates(passed: ArrayLike, tags: Sequence[str | None], prompts: Sequence[str]) -> PassRates:
    """Return pass rates per tag and overall.

    GenEval's overall score (arXiv 2310.11513) is the mean over its six tags of the fraction of correct images. So each tag
    has the same weight, however many prompts it has.

    Args:
        passed: 0 or 1 of each sample, `[N]`.
        tags: tag of each sample's prompt, `[N]`; samples without a tag are not in the mean over tags.
        prompts: prompt of each sample, `[N]`.
    """
    numbers = _as_array("passed", passed)
    by_tag = {
        tag: float(numbers[[i for i, other in enumerate(tags) if other == tag]].mean())
        for tag in dict.fromkeys(tag for tag in tags if tag is not None)
    }
    best: dict[str, float] = {}
    for prompt, value in zip(prompts, numbers.tolist(), strict=True):
        best[prompt] = max(best.get(prompt, 0.0), value)
    everything = float(numbers.mean())
    overall = float(np.mean([*by_tag.values()])) if by_tag else everything
    return PassRates(by_tag, overall, everything, float(np.mean([*best.values()])))


def _check_pair(scores: ArrayLike, base: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    ours, theirs = _as_array("scores", scores), _as_array("base", base)
    if len(ours) != len(theirs):
        raise ValueError(f"a comparison got {len(ours)} scores and {len(theirs)} of the base, expected equally many")
    return ours, theirs


def _as_array(name: str, values: ArrayLike) -> np.ndarray:
    """Return numbers as an array `[N]` in float64."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(f"{name} has shape {list(numbers.shape)}, expected [N] with at least one number")
    return numbers


def _number_clusters(clusters: Sequence[object]) -> np.ndarray:
    """Number the clusters in the order in which they appear, and return each value's number."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
