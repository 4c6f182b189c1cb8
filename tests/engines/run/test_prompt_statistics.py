"""Statistics of each prompt's rewards over past rollouts: the formula of DDPO's code, and exact resumption."""

from collections import deque

import numpy as np
import pytest
import torch

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


def test_clipped_advantages_are_rescaled() -> None:
    """AWM's code divides them by the clip."""
    config = AdvantageConfig(history=4, history_min=4, eps=1e-6, ddof=0, clip=0.5, rescale=1.0)
    found = history_advantages(torch.tensor([0.0, 1.0, 2.0, 9.0]), ["p"] * 4, {}, config)
    assert found.abs().max() == 1.0
    assert found[2] == pytest.approx(2 * (2 - 3) / 12.5**0.5)
