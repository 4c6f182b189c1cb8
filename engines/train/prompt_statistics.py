"""Statistics of each prompt's rewards over past rollouts, which take the place of a group's (DDPO, arXiv 2305.13301)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.objectives.advantages import AdvantageConfig, bounded

# The last rewards of each prompt, oldest first: part of a run's checkpoints.
History = dict[str, list[float]]


class PromptStatistics:
    """Normalises the reward of a sample by the last rewards of its prompt.

        A = (r - mean_p) / (std_p + eps)

    mean_p and std_p are those of the last `config.history` rewards of the prompt, those of this rollout included. As long as
    there are fewer than `config.history_min`, they are those of all samples of the rollout.

    Args:
        config: how rewards become advantages.
        history: rewards so far.
    """

    def __init__(self, config: AdvantageConfig, history: History | None = None) -> None:
        self.config = config
        self.history: History = {} if history is None else history

    def advantages(self, reward: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the advantage of each sample of a rollout, `[B]`, and take its reward into the history.

        Args:
            reward: reward of each sample of the rollout, `[B]`, the same on every rank.
            prompts: prompt of each sample.
        """
        config, wide = self.config, reward.to(torch.float64)
        for prompt, value in zip(prompts, wide.tolist(), strict=True):
            known = self.history.setdefault(prompt, [])
            known.append(value)
            del known[: -config.history]
        moments = {
            prompt: self._moments(torch.tensor(known, dtype=torch.float64) if len(known) >= config.history_min else wide)
            for prompt, known in ((prompt, self.history[prompt]) for prompt in dict.fromkeys(prompts))
        }
        mean, std = (torch.tensor([moments[prompt][i] for prompt in prompts], dtype=torch.float64) for i in (0, 1))
        return bounded(((wide - mean) / (std + config.eps)).to(reward.dtype), config)

    def _moments(self, rewards: Tensor) -> tuple[float, float]:
        return float(rewards.mean()), float(rewards.std(correction=self.config.ddof))
