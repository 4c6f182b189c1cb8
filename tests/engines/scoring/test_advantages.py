"""Advantages of several rewards."""

import torch

from fluvial.core.dpo import best_and_worst
from fluvial.engines.scoring.advantages import AdvantageConfig, grade


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
