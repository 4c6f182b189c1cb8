"""Rewards with a floor: their multipliers, against a solution that is known, and as weights of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.spied_runs import FAST, STEPS

from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.scoring.advantages import (
    AdvantageConfig,
    learnt_weights,
    parse_floors,
    update_multipliers,
)


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
