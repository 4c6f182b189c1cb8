"""Statistics of each prompt's rewards over past rollouts: the formula of DDPO's code, and exact resumption."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_jobs as tiny

from fluvial.engines.engine.world import World
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.scoring.advantages import AdvantageConfig, History, history_advantages

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


def run(out: Path) -> Any:
    """Return a run without groups, over three prompts."""
    rollout = SamplingConfig(prompts=6, group=1, steps=tiny.STEPS, sampler=Stochastic(eta=0.5))
    return tiny.config(out, sampling=rollout, advantage=DDPO, updates=6, **{"checkpoint.every": 2})


def test_a_resumed_run_goes_on_exactly(one: World, tmp_path: Path) -> None:
    """Weights and history are those of the run without interruption, bit for bit."""
    config, job = run(tmp_path), tiny.job(prompts=("0", "1", "2"))
    with Trainer(config, job, one) as trainer:
        for record in trainer:
            if record["update"] == 2:
                trainer.save()
        weights = [parameter.detach().clone() for parameter in trainer.engine.module.parameters()]
        history = dict(trainer.progress.rewards)
    assert {len(known) for known in history.values()} == {8}
    with Trainer(config, job, one) as trainer:
        trainer.resume(checkpoint.list_checkpoints(config.checkpoint_folder)[-1])
        assert sum(len(known) for known in trainer.progress.rewards.values()) == 12
        list(trainer)
        assert trainer.progress.rewards == history
        assert all(map(torch.equal, trainer.engine.module.parameters(), weights))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"history_min": 8}, "advantage.history is 0"),
        ({"history": 8}, "history_min is 16, expected at most advantage.history 8"),
        ({"history": 16, "scale": "batch"}, "or advantage.scale group and combine sum"),
        ({"history": 16, "combine": "gdpo"}, "or advantage.scale group and combine sum"),
        ({"rescale": 1.0}, "advantage.clip is None"),
    ],
)
def test_settings_that_would_do_nothing(settings: dict[str, Any], says: str) -> None:
    """They are errors."""
    with pytest.raises(ValueError, match=says):
        AdvantageConfig(**settings)


def test_a_group_of_one_needs_a_history(tmp_path: Path) -> None:
    """Otherwise a sample has nothing to be compared with."""
    with pytest.raises(ValueError, match=r"sampling.group is 1, expected at least 2"):
        tiny.config(tmp_path, sampling=SamplingConfig(prompts=6, group=1, steps=tiny.STEPS, sampler=Stochastic(eta=0.5)))


def test_clipped_advantages_are_rescaled() -> None:
    """AWM's code divides them by the clip."""
    config = AdvantageConfig(history=4, history_min=4, eps=1e-6, ddof=0, clip=0.5, rescale=1.0)
    found = history_advantages(torch.tensor([0.0, 1.0, 2.0, 9.0]), ["p"] * 4, {}, config)
    assert found.abs().max() == 1.0
    assert found[2] == pytest.approx(2 * (2 - 3) / 12.5**0.5)
