"""Clean samples with noise on them: at which levels, with which keys, and what the model should predict there."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import launch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fluvial.core.random import Key, fold_in, key, normal
from fluvial.core.sigmas import shifted
from fluvial.engines.sampling.items import NoisedSamples, make_noised_pairs, make_noised_samples, transfers
from fluvial.engines.sampling.noising import (
    AutoLevels,
    ContinuousLevels,
    LogitNormalLevels,
    NoisingConfig,
    ScheduleLevels,
    ShiftedLevels,
    StratifiedLevels,
    UniformLevels,
    add_noise,
    draw_levels,
)
from fluvial.models import Prediction, Schedule

B, STEPS = 64, 10
SCHEDULES: dict[Prediction, Schedule] = {
    "velocity": tiny.Tiny().schedule(STEPS, tiny.SHAPE),
    "epsilon": tiny.Tiny("epsilon").schedule(STEPS, tiny.SHAPE),
}


def keys(count: int = B) -> Key:
    """Return one key per sample."""
    return fold_in(key(3), torch.arange(count))


def clean(count: int = B) -> Tensor:
    """Return clean samples, drawn from a normal distribution."""
    return torch.rand(count, *tiny.SHAPE, generator=torch.Generator().manual_seed(0))


def put(
    config: NoisingConfig, prediction: Prediction = "velocity", rows: Any = slice(None), dtype: Any = None
) -> NoisedSamples:
    """Return the pairs of some of the samples."""
    every = keys()
    x0 = clean()[rows] if dtype is None else clean()[rows].to(dtype)
    weight = torch.ones(len(x0))
    own = Key(every.low[rows], every.high[rows])  # type: ignore[index]
    return make_noised_samples(x0, own, torch.arange(B).float()[rows], weight, SCHEDULES[prediction], config, prediction)


@pytest.mark.parametrize("prediction", ["velocity", "epsilon"])
@pytest.mark.parametrize("each", [1, 4, STEPS])
def test_levels_of_the_schedule(prediction: Prediction, each: int) -> None:
    """Different steps for one sample, all equally often, each with the timestep that the scheduler gives the model."""
    schedule = SCHEDULES[prediction]
    levels, timesteps = draw_levels(keys(600), schedule, NoisingConfig(each))
    assert timesteps is not None
    assert levels.shape == timesteps.shape == (600, each)
    step = (levels[..., None] == schedule.levels[:-1]).nonzero()[:, -1].reshape(600, each)  # of all there is one
    assert torch.equal(schedule.timesteps[step], timesteps)
    assert all(len(set(row)) == each for row in step.tolist())
    often = torch.bincount(step.flatten(), minlength=STEPS) / (600 * each)
    assert float((often - 1 / STEPS).abs().max()) < 0.04


def test_levels_between_the_steps() -> None:
    """They lie along the schedule as its steps do: as many in each, evenly within it, and none is given a timestep."""
    levels, timesteps = draw_levels(keys(1000), SCHEDULES["velocity"], NoisingConfig(4, ContinuousLevels()))
    assert timesteps is None
    grid = SCHEDULES["velocity"].levels
    for upper, lower in pairwise(grid.tolist()):
        inside = levels[(levels <= upper) & (levels > lower)]
        assert len(inside) / 4000 == pytest.approx(1 / STEPS, abs=0.025)
        assert float(((inside - lower) / (upper - lower)).mean()) == pytest.approx(0.5, abs=0.06)
    assert len(torch.unique(levels)) > 3900
    assert float(levels.min()) >= 0
    assert float(levels.max()) <= 1


def test_levels_of_a_logit_normal() -> None:
    """The logit's mean is 0 and its deviation 1."""
    levels, timesteps = draw_levels(keys(1000), SCHEDULES["velocity"], NoisingConfig(4, LogitNormalLevels()))
    assert timesteps is None
    logit = torch.logit(levels.double())
    assert float(logit.mean()) == pytest.approx(0, abs=0.06)
    assert float(logit.std()) == pytest.approx(1, abs=0.04)
    assert abs(float(torch.corrcoef(logit.T)[0, 1])) < 0.1


def test_the_mean_of_a_logit_normal_shifts_the_levels() -> None:
    """The mean log 3 moves each level as a schedule's shift of 3 does."""
    found, moved = (
        draw_levels(keys(100), SCHEDULES["velocity"], NoisingConfig(4, LogitNormalLevels(mean)))[0].double()
        for mean in (0.0, math.log(3))
    )
    torch.testing.assert_close(moved, 3 * found / (1 + 2 * found), rtol=1e-5, atol=1e-6)


def test_shifted_levels_are_those_of_a_shifted_schedule_within_bounds() -> None:
    """A uniform draw is moved as the levels of a schedule are, whose own are as far apart; the rest lies on a bound."""
    plain, whole, bounded = (
        draw_levels(keys(1000), SCHEDULES["velocity"], NoisingConfig(4, levels))[0].double()
        for levels in (UniformLevels(), ShiftedLevels(0.0, 1.0, shift=5.0), ShiftedLevels())
    )
    torch.testing.assert_close(whole, 5 * plain / (1 + 4 * plain), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bounded, whole.clamp(0.02, 0.98), rtol=1e-5, atol=1e-6)
    # Nine tenths of the draws lie above u = 0.1, which a shifted schedule of 10 steps has as its last level.
    assert float((whole > shifted(10, 5.0)[-2]).double().mean()) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("levels", [ScheduleLevels(), StratifiedLevels(), ContinuousLevels(), LogitNormalLevels()])
def test_a_sample_depends_on_its_key_alone(levels: Any) -> None:
    """Any slice or permutation of the batch has the same levels and noise, to the bit."""
    config = NoisingConfig(3, levels)
    whole = put(config)
    for rows in (torch.arange(5, 9), torch.randperm(B, generator=torch.Generator().manual_seed(1)), torch.tensor([7])):
        part = put(config, rows=rows)
        for m in range(3):
            place = m * B + rows
            own = slice(m * len(rows), (m + 1) * len(rows))
            for name in ("x", "level", "timestep", "signal", "weight", "x0", "target"):
                mine, known = getattr(part, name), getattr(whole, name)
                assert (
                    (mine is None)
                    == (known is None)
                    == (name == "timestep" and isinstance(levels, ContinuousLevels | LogitNormalLevels))
                )
                if mine is not None:
                    assert torch.equal(mine[own], known[place]), name
        assert torch.equal(part.sample, torch.arange(len(rows)).repeat(3))


def test_automatic_levels_are_those_that_the_model_can_take() -> None:
    """Any level, or distinct steps of its schedule; levels that were asked for stay."""
    auto = NoisingConfig(3, AutoLevels())
    assert auto.choose_levels(on_schedule=True) == NoisingConfig(3, ScheduleLevels())
    assert auto.choose_levels(on_schedule=False) == NoisingConfig(3, ContinuousLevels())
    asked = NoisingConfig(3, LogitNormalLevels())
    assert asked.choose_levels(on_schedule=True) == asked.choose_levels(on_schedule=False) == asked


def test_noise_is_drawn_for_each_level() -> None:
    """It is standard normal, differs between a sample's levels and between samples, and is independent of the levels."""
    pairs = put(NoisingConfig(2))
    assert pairs.target is not None
    assert pairs.x0 is not None
    noise = (pairs.target + pairs.x0).unflatten(0, (2, B))
    assert float(noise.mean()) == pytest.approx(0, abs=0.08)
    assert float(noise.std()) == pytest.approx(1, abs=0.06)
    for first, second in ((noise[0], noise[1]), (noise[:, 1:], noise[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.1
    more = put(NoisingConfig(2, ContinuousLevels()))
    torch.testing.assert_close(more.target, pairs.target)


FORMULAS: dict[Prediction, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "velocity": lambda x0, noise, s: ((1 - s) * x0 + s * noise, noise - x0),
    "epsilon": lambda x0, noise, s: (s**0.5 * x0 + (1 - s) ** 0.5 * noise, noise),
}


@pytest.mark.parametrize("prediction", FORMULAS)
def test_the_formulas(prediction: Prediction) -> None:
    """In float64, and what `noised` returns by the keys of noise and levels that it says."""
    x0, noise = clean().double(), normal(key(9), (B, *tiny.SHAPE), dtype=torch.float64)
    level = torch.linspace(0.01, 0.99, B, dtype=torch.float64)
    expected = FORMULAS[prediction](x0, noise, level[:, None, None, None])
    for got, known in zip(add_noise(x0, noise, level, prediction=prediction), expected, strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, known, rtol=1e-14, atol=1e-14)

    pairs = put(NoisingConfig(2), prediction, dtype=torch.float64)
    assert pairs.target is not None
    assert pairs.x0 is not None
    drawn = pairs.target + (pairs.x0 if prediction == "velocity" else 0)
    x, target = FORMULAS[prediction](pairs.x0, drawn, pairs.level.double()[:, None, None, None])
    assert pairs.x.dtype == torch.float64
    torch.testing.assert_close(pairs.x, x, rtol=1e-6, atol=1e-6)  # levels are float32
    torch.testing.assert_close(pairs.target, target)
    torch.testing.assert_close(pairs.x0, clean().double().repeat(2, 1, 1, 1))
    # A model that is right about it takes the sample back to where it came from.
    shaped = pairs.level.double()[:, None, None, None]
    if prediction == "velocity":
        back = pairs.x - shaped * pairs.target
    else:
        back = (pairs.x - (1 - shaped) ** 0.5 * pairs.target) / shaped**0.5
    torch.testing.assert_close(back, pairs.x0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prediction", FORMULAS)
def test_a_preference_shares_noise_and_level(prediction: Prediction) -> None:
    """The two samples of a pair differ by what is clean in them, and by nothing else; the preferred one is the first."""
    ones, schedule, config = torch.ones(B), SCHEDULES[prediction], NoisingConfig(3)
    x0 = torch.stack([clean(), clean().flip(0)], dim=1).repeat(3, 1, 1, 1, 1)
    both = make_noised_pairs(clean(), clean().flip(0), keys(), ones, schedule, config, prediction)
    assert both.x.shape == (3 * B, 2, *tiny.SHAPE)
    assert both.level.shape == (3 * B,)
    assert torch.equal(both.level, make_noised_samples(clean(), keys(), ones, ones, schedule, config, prediction).level)
    noise = both.target + (x0 if prediction == "velocity" else 0)
    torch.testing.assert_close(noise[:, 0], noise[:, 1])
    level = both.level[:, None, None, None, None]
    kept = 1 - level if prediction == "velocity" else level**0.5
    torch.testing.assert_close(both.x[:, 0] - both.x[:, 1], (kept * (x0[:, :1] - x0[:, 1:]))[:, 0])


LONG = Schedule(torch.linspace(1, 0, 15), torch.arange(14.0))


def test_stratified_levels() -> None:
    """AWM's: 6 of the steps 1 to 11, one of each part 1, 2-3, 4-5, 6-7, 8-9 and 10-11, uniformly."""
    levels, timesteps = draw_levels(keys(2000), LONG, NoisingConfig(6, StratifiedLevels(highest=12, skip=1)))
    assert timesteps is not None
    assert torch.equal(levels, LONG.levels[timesteps.long()])
    for part, expected in enumerate([[1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]):
        drawn, count = timesteps[:, part].unique(return_counts=True)
        assert drawn.tolist() == expected
        assert (count / 2000 - 1 / len(expected)).abs().max() < 0.05


def test_more_stratified_levels_than_steps() -> None:
    """A part without a whole step takes the step below it, as the published code does."""
    _, timesteps = draw_levels(keys(3), LONG, NoisingConfig(6, StratifiedLevels(highest=3)))
    assert timesteps is not None
    assert timesteps.tolist() == [[0, 0, 1, 1, 2, 2]] * 3


def test_steps_that_are_left_out() -> None:
    """Distinct steps of the range alone; all of them where it has no more."""
    _, timesteps = draw_levels(keys(50), LONG, NoisingConfig(3, ScheduleLevels(highest=5, skip=2)))
    assert timesteps is not None
    assert {tuple(sorted(row)) for row in timesteps.tolist()} == {(2, 3, 4)}


@pytest.mark.parametrize("levels", [ScheduleLevels(), StratifiedLevels()])
def test_rows_have_the_levels_of_their_own_schedules(levels: Any) -> None:
    """At the same steps; two schedules that are the same are one, and levels between the steps are refused."""
    plain, x0 = SCHEDULES["velocity"], clean()
    count, weight, config = x0.shape[1], torch.ones(B), NoisingConfig(2, levels)
    columns = torch.stack([plain.levels ** (1 + number) for number in range(count)], dim=1)

    def noised(levels: Tensor, config: NoisingConfig = config) -> NoisedSamples:
        return make_noised_samples(x0, keys(), weight, weight, Schedule(levels, plain.timesteps), config, "velocity")

    one, same, apart = noised(plain.levels), noised(plain.levels[:, None].expand(-1, count)), noised(columns)
    assert torch.equal(one.x, same.x)
    assert torch.equal(same.level, one.level[:, None].expand(-1, count))
    assert torch.equal(apart.level[:, 0], one.level)
    for row in range(count):
        noise = (one.x - (1 - one.level[:, None, None, None]) * one.x0) / one.level[:, None, None, None]
        level = apart.level[:, row, None, None]
        assert torch.equal(apart.level[:, row], columns[(plain.levels == one.level[:, None]).long().argmax(1), row])
        torch.testing.assert_close(apart.x[:, row], (1 - level) * x0.repeat(2, 1, 1, 1)[:, row] + level * noise[:, row])
    assert torch.equal(apart.find_parts(columns), one.find_parts(plain.levels))
    parts = one._replace(level=torch.tensor([0.0, 0.1, 0.95, 1.0])).find_parts(plain.levels)
    assert parts.int().argmax(1).tolist() == [0, 1, 9, 9]
    refuses(
        "is 'continuous', expected schedule or stratified: the pieces", noised, columns, NoisingConfig(2, ContinuousLevels())
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_moves_level_the_ranks(counts: list[int]) -> None:
    """Nothing is made or lost, shares differ by one at most, and nobody both gives and takes."""
    plan = transfers(counts)
    after = [count - sum(plan[rank]) + sum(row[rank] for row in plan) for rank, count in enumerate(counts)]
    assert sum(after) == sum(counts)
    assert max(after) - min(after) <= 1
    for rank in range(len(counts)):
        gives, takes = sum(plan[rank]), sum(row[rank] for row in plan)
        assert not (gives and takes)
        assert 0 <= gives <= counts[rank]


@pytest.mark.parametrize("ranks", [2, 4])
def test_pairs_move_whole(ranks: int) -> None:
    """On real ranks: each pair with its own tensors and its own conditioning, once."""
    for case in launch.on_ranks(ranks, "workers.moving:move")[0]:
        found: list[list[Any]] = [pair for rank in case["found"] for pair in rank]
        assert sorted(found) == sorted(case["expected"])
        assert max(map(len, case["found"])) - min(map(len, case["found"])) <= 1
