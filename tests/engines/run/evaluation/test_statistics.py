"""Statistics of scores against plain numpy, and their properties for any scores."""

import numpy as np
import pytest
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.run.evaluation.statistics import (
    bootstrap_interval,
    compare,
    compute_pass_rates,
    compute_win_rate,
    is_pass_fail,
)

FLOATS = st.floats(-100, 100, width=32)
SCORES = st.lists(FLOATS, min_size=1, max_size=12)
PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, 3.5]), st.sampled_from([0.0, 0.25, 1.0, 3.5])), min_size=1)


@given(PAIRS)
def test_a_win_rate_counts_a_tie_one_half(pairs: list[tuple[float, float]]) -> None:
    wins = sum(1.0 if ours > base else 0.5 if ours == base else 0.0 for ours, base in pairs)
    ours, base = zip(*pairs, strict=True)
    assert compute_win_rate(ours, base) == pytest.approx(wins / len(pairs))
    assert compute_win_rate(ours, base) + compute_win_rate(base, ours) == pytest.approx(1)
    assert compute_win_rate(ours, ours) == 0.5


@given(SCORES, st.sampled_from([0.5, 0.9, 0.95]), st.integers(0, 5))
def test_the_interval_is_that_of_plain_numpy(values: list[float], level: float, seed: int) -> None:
    """Quantiles of the means of resamples, drawn from the same generator."""
    draws, array = np.random.default_rng(seed), np.array(values)
    means = np.array([array[draws.integers(len(array), size=len(array))].mean() for _ in range(150)])
    low, high = bootstrap_interval(values, level=level, resamples=150, seed=seed)
    assert low == pytest.approx(np.quantile(means, (1 - level) / 2), abs=1e-9)
    assert high == pytest.approx(np.quantile(means, (1 + level) / 2), abs=1e-9)
    assert bootstrap_interval(values, level=level, resamples=150, seed=seed) == (low, high)


@given(SCORES)
def test_the_interval_lies_within_the_values_and_shrinks_to_a_constant(values: list[float]) -> None:
    low, high = bootstrap_interval(values, resamples=100)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    same = bootstrap_interval([values[0]] * 5, resamples=100)
    assert same == pytest.approx((values[0], values[0]), abs=1e-9)


def test_samples_of_a_cluster_stay_together() -> None:
    """Ten copies of each value say no more than the values; as values of their own they would seem to."""
    values = [0.0, 1.0, 2.0, 4.0, 9.0]
    copies, clusters = values * 10, [f"prompt {number}" for number in range(5)] * 10
    assert bootstrap_interval(copies, clusters) == pytest.approx(bootstrap_interval(values))
    apart = bootstrap_interval(copies)
    together = bootstrap_interval(copies, clusters)
    assert apart.high - apart.low < 0.5 * (together.high - together.low)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Of 400 samples of 60 numbers, 90 % intervals hold the mean in about 90 %."""
    draws = np.random.default_rng(0).exponential(size=(400, 60))
    held = sum(low <= 1 <= high for low, high in (bootstrap_interval(row, level=0.9, resamples=200) for row in draws))
    assert 0.80 <= held / 400 <= 0.96


def test_a_paired_difference_is_sharper_than_the_scores_are_spread() -> None:
    """Scores that differ widely between prompts, each 0.1 above the base's from the same noise."""
    base = np.linspace(-50, 50, 40)
    found = compare(base + 0.1, base)
    assert found.win_rate == 1
    assert found.difference == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.1, 0.1))


def test_overall_is_the_mean_over_tags_as_in_geneval() -> None:
    """However many samples a tag has; a prompt passes if any of its samples does."""
    tags = ["colors", "colors", "colors", "colors", "counting", "counting", None]
    prompts = ["a", "a", "b", "b", "c", "c", "d"]
    found = compute_pass_rates([1, 0, 1, 1, 0, 0, 1], tags, prompts)
    assert found.tags == {"colors": 0.75, "counting": 0.0}
    assert found.overall == pytest.approx(0.375)
    assert found.samples == pytest.approx(4 / 7)
    assert found.prompts == pytest.approx(3 / 4)
    assert compute_pass_rates([1, 0], [None, None], ["a", "b"]).overall == 0.5


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1), FLOATS.filter(lambda value: value not in (0.0, 1.0)))
def test_pass_or_fail_is_0_or_1_and_nothing_else(passed: list[float], other: float) -> None:
    assert is_pass_fail(passed)
    assert not is_pass_fail([*passed, other])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: compute_win_rate([1.0], [1.0, 2.0]), "a comparison got 1 scores and 2 of the base, expected equally many"),
        (lambda: compute_win_rate([], []), r"scores has shape \[0\], expected \[N\] with at least one number"),
        (lambda: bootstrap_interval([1.0], level=1.0), r"level is 1.0, expected a number in \(0, 1\)"),
        (lambda: bootstrap_interval([1.0], resamples=0), "resamples is 0, expected at least 1"),
        (lambda: bootstrap_interval([1.0, 2.0], ["a"]), "got 1 clusters of 2 values, expected one per value"),
    ],
)
def test_what_cannot_be_computed_is_said(call, says: str) -> None:  # type: ignore[no-untyped-def]
    refuses(says, call)
