"""Rollouts ahead of a trainer: bounds, monotony and closed forms of the model, and what `fluvial plan` says of it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluvial.engines.cli import main as cli
from fluvial.engines.extensions.plan.simulate import (
    AheadConfig,
    Timeline,
    compute_steady_seconds,
    draw_times,
    find_best_split,
    find_least,
    share_seconds,
    simulate,
    simulate_config,
)

SECONDS = st.floats(0.01, 100)
RUNS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30)
PUSHES = st.one_of(st.just(0.0), st.floats(0.0, 20.0))
AHEAD = st.integers(0, 6)
ROUNDING = 1e-9


def drawn(run: Sequence[tuple[float, float]], push: float, ahead: int) -> Timeline:
    return simulate([a for a, _ in run], [b for _, b in run], push=push, ahead=ahead)


@given(RUNS, PUSHES, AHEAD)
def test_a_run_is_never_faster_than_its_trainer_or_its_servers(
    run: list[tuple[float, float]], push: float, ahead: int
) -> None:
    """The trainer does all updates after the first rollout, the servers all rollouts before the last update."""
    found, rollouts, updates = drawn(run, push, ahead), [a for a, _ in run], [b for _, b in run]
    assert found.seconds >= push + rollouts[0] + sum(updates) - ROUNDING * found.seconds
    assert found.seconds >= push + sum(rollouts) + updates[-1] - ROUNDING * found.seconds
    assert found.waited + sum(updates) == pytest.approx(found.seconds)
    assert 0 < found.idle < 1


@given(RUNS, PUSHES, AHEAD)
def test_events_follow_from_each_other(run: list[tuple[float, float]], push: float, ahead: int) -> None:
    """No rollout begins before its weights or the rollout before it; staleness is bounded by K and reaches it."""
    found = drawn(run, push, ahead)
    for number, version in enumerate(found.versions):
        assert number - version == min(number, ahead)
        assert found.starts[number] >= (found.update_ends[version - 1] if version else 0.0)
        assert not number or found.starts[number] >= found.rollout_ends[number - 1]
        assert found.update_ends[number] >= found.rollout_ends[number] + run[number][1] - ROUNDING * found.seconds


@given(RUNS, PUSHES, AHEAD)
def test_more_updates_ahead_are_never_slower(run: list[tuple[float, float]], push: float, ahead: int) -> None:
    one, more = drawn(run, push, ahead), drawn(run, push, ahead + 1)
    assert all(b <= a + ROUNDING * a for a, b in zip(one.update_ends, more.update_ends, strict=True))


@given(RUNS, PUSHES)
def test_nothing_ahead_is_the_sum(run: list[tuple[float, float]], push: float) -> None:
    """With K = 0 every rollout is pushed, made and learnt from in turn."""
    assert drawn(run, push, 0).seconds == pytest.approx(sum(a + b for a, b in run) + push * len(run))


@given(SECONDS, SECONDS, PUSHES, AHEAD)
def test_equal_times_have_a_closed_form(rollout: float, update: float, push: float, ahead: int) -> None:
    """A run of n rollouts takes n times what the closed form says, up to the circle that it begins and ends with."""
    count, circle = 200 * (ahead + 1), push + rollout + update
    seconds = simulate([rollout] * count, [update] * count, push=push, ahead=ahead).seconds
    expected = count * compute_steady_seconds(rollout, update, push=push, ahead=ahead)
    assert abs(seconds - expected) <= (ahead + 1) * circle * (1 + ROUNDING)


@given(st.integers(1, 64), st.integers(1, 20), AHEAD, st.floats(0, 1))
def test_more_servers_are_never_slower(samples: int, servers: int, ahead: int, spread: float) -> None:
    config = AheadConfig(rollout_seconds=10, update_seconds=3, push_seconds=1, samples=samples, spread=spread)
    one, more = (simulate_config(config, servers=count, ahead=ahead).seconds for count in (servers, servers + 1))
    assert more <= one * (1 + ROUNDING)


@given(SECONDS, st.integers(1, 100), st.integers(1, 200))
def test_the_largest_share_of_whole_samples_decides(seconds: float, samples: int, parts: int) -> None:
    found = share_seconds(seconds, samples, parts)
    assert found >= seconds / min(parts, samples) * (1 - ROUNDING)
    assert round(found * samples / seconds) == -(-samples // parts)


def test_random_times_have_their_mean_and_spread() -> None:
    found = draw_times(5.0, 0.5, Random(0), 20_000)
    mean = sum(found) / len(found)
    assert mean == pytest.approx(5.0, rel=0.02)
    assert math.sqrt(sum((x - mean) ** 2 for x in found) / len(found)) == pytest.approx(2.5, rel=0.05)
    assert draw_times(5.0, 0.0, Random(0), 3) == [5.0] * 3


def test_the_least_servers_and_updates_ahead_are_found() -> None:
    config = AheadConfig(rollout_seconds=120, update_seconds=40, push_seconds=3, samples=64, spread=0.3)
    found = find_least(config)
    every = itertools.product(range(1, 9), range(config.ahead + 1))
    busy = [
        (count, ahead) for count, ahead in every if simulate_config(config, servers=count, ahead=ahead).idle <= config.idle
    ]
    assert found == min(busy)
    assert found is not None
    assert found[1] == 2  # one update ahead is too few for times that differ
    assert find_least(replace(config, servers=2)) is None
    assert find_least(replace(config, push_seconds=41)) is None  # which more servers do not shorten


def test_gpus_are_divided_so_that_no_other_division_is_faster() -> None:
    """Of 16 GPUs, with servers of two; a rollout costs three times an update."""
    config = AheadConfig(rollout_seconds=120, update_seconds=40, gpus=4, samples=960, server_gpus=2)
    found = find_best_split(config, 16)
    assert found.gpus + 2 * found.servers == 16
    for servers in range(1, 8):
        update = 40 * 4 / (16 - 2 * servers)
        assert found.run.seconds_per_rollout <= 1.01 * max(120 / servers, update)
    assert found.in_turn == pytest.approx(120 / 8 + 40 * 4 / 16)


def test_plan_prints_both_tables(capfd: pytest.CaptureFixture[str]) -> None:
    typed = "plan --rollout-seconds 120 --update-seconds 40 --gpus 8 --push-seconds 3"
    assert cli.run(typed.split()) == 0
    text = capfd.readouterr().out
    assert "4 servers and K = 1 keep the trainer busy" in text
    assert "1024 GPUs" in text
    assert cli.run([*typed.split(), "--servers", "1", "--most-gpus", "4"]) == 0
    text = capfd.readouterr().out
    assert "1 server does not keep the trainer busy" in " ".join(text.split())
    assert "8 GPUs │" not in text


def test_wrong_seconds_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for typed, line in {
        "--update-seconds 40": "--rollout-seconds is 0, expected the seconds of a measured run",
        "--rollout-seconds 4 --update-seconds 1 --most-gpus 4 --server-gpus 4": "--most-gpus is 4, expected more than",
        "--rollout-seconds 4 --update-seconds 1 --ahead -1": "ahead is -1, expected",
    }.items():
        assert cli.run(["plan", *typed.split()]) == 2
        assert line in capfd.readouterr().err
