"""Advantages of several rewards: flat groups, statistics of past rollouts, floors, and groups without a valid reward."""

import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import fails
from helpers.spied_runs import FAST, STEPS

from fluvial.core.dpo import best_and_worst
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.scoring.advantages import (
    AdvantageConfig,
    History,
    grade,
    history_advantages,
    learnt_weights,
    parse_floors,
    update_multipliers,
)
from fluvial.engines.scoring.gather import check_invalid, find_kept_samples


def test_a_flat_group_has_no_best_sample_wherever_it_stands() -> None:
    """With any number of rewards; a matrix product rounds its last rows otherwise than the rest."""
    drawn = torch.Generator().manual_seed(0)
    for rewards in (2, 5, 6):
        scores = torch.rand(1, rewards, generator=drawn).expand(48, rewards)
        for samples in (2, 5, 7, 11, 23, 47):
            group, weights = torch.zeros(samples, dtype=torch.int64), torch.rand(rewards, generator=drawn)
            grades = grade(scores[:samples].contiguous(), weights, group, AdvantageConfig(), history={})
            assert not grades.advantage.any()
            assert not best_and_worst(grades.reward, group).valid.any()


@pytest.mark.parametrize("combine", ["sum", "gdpo", "advantages"])
def test_a_flat_group_beside_others_has_the_advantage_zero(combine: Any) -> None:
    """Exactly, so that it is left out: the mean over the batch, which gdpo divides around, is 0 but for rounding."""
    for seed in range(5):
        scores = torch.rand(24, 3, generator=torch.Generator().manual_seed(seed))
        scores[8:16], config = 0.3, AdvantageConfig(combine=combine, drop_zero=True, extremes=2)
        keep = grade(scores, torch.tensor([1.0, 0.5, 0.3]), torch.arange(24) // 8, config, history={}).keep
        assert keep.unflatten(0, (3, 8)).mean(1).tolist() == [0.5, 0, 0.5]


DDPO = AdvantageConfig(history=8, history_min=4, eps=1e-6, ddof=0, clip=5.0)


def published(stats: dict[str, deque[float]], prompts: list[str], rewards: np.ndarray) -> np.ndarray:
    """Return the advantages as DDPO's description has them, written from it: a buffer of 8 per prompt, 4 at least."""
    names, found = np.array(prompts), np.empty_like(rewards)
    for prompt in sorted(set(prompts)):
        own = stats.setdefault(prompt, deque(maxlen=8))
        own.extend(rewards[names == prompt])
        known = rewards if len(own) < 4 else np.array(own)
        found[names == prompt] = (rewards[names == prompt] - np.mean(known)) / (np.std(known) + 1e-6)
    return np.clip(found, -5, 5)


def test_the_formula() -> None:
    """Over 6 rollouts of 10 samples, some of prompts with too few rewards, some with more than are kept."""
    random, stats = np.random.default_rng(0), dict[str, deque[float]]()
    history: History = {}
    for _ in range(6):
        prompts = [str(place) for place in random.choice(9, 10, p=[0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])]
        rewards = random.normal(size=10)
        expected = published(stats, prompts, rewards)
        assert np.allclose(
            history_advantages(torch.from_numpy(rewards), prompts, history, DDPO).numpy(), expected, rtol=1e-12, atol=1e-12
        )
    assert max(map(len, history.values())) == 8
    assert min(map(len, history.values())) < 4
    assert history_advantages(torch.ones(1), ["p"], {}, replace(DDPO, ddof=1)).tolist() == [0]  # of a single sample


def test_clipped_advantages_are_rescaled() -> None:
    """AWM's code divides them by the clip."""
    config = AdvantageConfig(history=4, history_min=4, eps=1e-6, ddof=0, clip=0.5, rescale=1.0)
    found = history_advantages(torch.tensor([0.0, 1.0, 2.0, 9.0]), ["p"] * 4, {}, config)
    assert found.abs().max() == 1.0
    assert found[2] == pytest.approx(2 * (2 - 3) / 12.5**0.5)


def test_multipliers_find_the_known_solution() -> None:
    """Of max -p^2 subject to p >= 1/2, whose multiplier is 1; of a floor that holds anyway it is 0.

    Step by step it stays between 0 and its bound, with the step size per unit of the reward.
    """
    multipliers: dict[str, float] = {}
    for _ in range(200):
        p = multipliers.get("c", 0.0) / 2  # the best answer to the multiplier: it maximises -p^2 + lambda p
        multipliers = update_multipliers(multipliers, {"c": p, "loose": p}, {"c": 0.5, "loose": -1.0}, lr=0.2, most=10.0)
    assert multipliers["c"] == pytest.approx(1.0, abs=1e-6)
    assert multipliers["loose"] == 0.0
    steps = [0.0]
    for mean in (0.0, 0.0, 0.0, 2.0, 2.0):
        steps.append(update_multipliers({"c": steps[-1]}, {"c": mean}, {"c": 1.0}, lr=0.5, most=1.25)["c"])
    assert steps == [0.0, 0.5, 1.0, 1.25, 0.75, 0.25]
    assert update_multipliers({}, {"c": 5.0}, {"c": 1.0}, lr=0.5, most=1.25) == {"c": 0.0}


def test_weights_of_what_is_learnt_from_and_of_what_is_maximised() -> None:
    """A multiplier stands in for the weight of its reward alone."""
    weights, names = torch.tensor([0.3, 1.0, -2.0]), ["a", "b", "c"]
    assert torch.equal(learnt_weights(weights, names, {"b": 0.7}), torch.tensor([0.3, 0.7, -2.0]))
    assert torch.equal(learnt_weights(weights, names, {"b": 0.0}), torch.tensor([0.3, 0.0, -2.0]))
    assert torch.equal(learnt_weights(weights, names, {}), weights)


def test_a_floor_is_a_name_and_a_number() -> None:
    """A name may hold a colon."""
    assert parse_floors(["mine:score=-1", "b=2"], field="x") == {"mine:score": -1.0, "b": 2.0}


def config(out: Path, rewards: tuple[str, ...] = ("brightness", "contrast"), **advantage: Any) -> TrainConfig:
    """Return a run of two groups of four by both rewards of the tiny job."""
    rollout, settings = replace(STEPS, prompts=2), AdvantageConfig(**advantage)
    return tiny.config(
        out, rewards=rewards, sampling=rollout, advantage=settings, optimizer=FAST, updates=4, **{"engine.micro_batch": 4}
    )


@pytest.mark.parametrize("combine", ["sum", "gdpo", "advantages"])
def test_a_floor_is_a_weight_that_is_found(one: World, tmp_path: Path, combine: str) -> None:
    """The update is that of a run with the multiplier as its weight, and the record has the multiplier."""
    floored = tiny.Run(config(tmp_path, floors=("contrast=40",), floor_lr=0.05, combine=combine), one)
    record = floored.rollout()
    multiplier = 0.05 * (40 - record["rewards"]["contrast"])
    assert record["multipliers"] == {"contrast": pytest.approx(multiplier, rel=1e-5)}
    assert record["reward"]["mean"] == pytest.approx(record["rewards"]["brightness"])
    text = f"contrast={record['multipliers']['contrast']!r}"
    weighted = tiny.Run(config(tmp_path, ("brightness", text), combine=combine), one)
    weighted.rollout()
    assert all(torch.equal(tensor, weighted.gradient()[name]) for name, tensor in floored.gradient().items())
    assert floored.rollout()["multipliers"] != record["multipliers"]


NAN = math.nan


def test_a_group_is_left_out_as_a_whole() -> None:
    """Also where another reward of another sample is the invalid one."""
    rewards = torch.tensor([[1.0, 1.0], [1.0, NAN], [1.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, 1.0]])
    kept = find_kept_samples(rewards, 2)
    assert kept.tolist() == [False, False, True, True, False, False]
    assert find_kept_samples(torch.zeros(4, 0), 2).all()


@pytest.mark.parametrize(("bad", "most"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.9), (1, 0.2), (2, 0.25), (1, 0.0), (4, 0.9)])
def test_what_is_tolerated_is_warned_of_and_more_ends_the_run(one: World, bad: int, most: float) -> None:
    """With the reason, the number of groups and what becomes of them; where all are valid it is silent."""
    rewards, says = torch.ones(8, 1), f"^why; {bad} of the 4 groups of the rollout have no valid reward"
    rewards[: 2 * bad : 2] = NAN

    def check() -> dict[str, int]:
        return check_invalid(rewards, ["why", "other"] if bad else [], group=2, most=most, world=one)

    if bad / 4 > most:
        fails(rf"{says}, above rollout.max_invalid {most:g}$", check)
    elif bad:
        with pytest.warns(UserWarning, match=f"{says} and are left out"):
            assert check() == {"samples": bad, "groups": bad}
    else:
        assert check() == {"samples": 0, "groups": 0}
