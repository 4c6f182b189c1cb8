"""Advantages: rewards relative to the other samples of their group."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fluvial.core.advantages import Scale, group_advantages, multi_reward_advantages
from fluvial.core.checks import check_fields

SMALLEST = (1e-12, 1e30)


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        scale: Standard deviation by which a reward's distance to its group's mean is divided: group (of its group), batch
            (of all samples of the rollout) or none.
        eps: Number added to that standard deviation, in the unit of the reward.
        clip: Bound of the advantages, which are clipped to [-clip, clip]; None clips nothing.
        combine: How several rewards become one advantage: sum (of the weighted rewards) or gdpo (each reward is normalised
            in its group, then weighted, then normalised over the batch, arXiv 2601.05242).
        ddof: Delta degrees of freedom of the standard deviations: 1 (unbiased) or 0 (of the population, as numpy's, which
            Flow-GRPO's code takes).
        drop_zero: Leave samples with advantage 0 out of the loss, its KL term and the count that it is averaged over, as
            Flow-GRPO's code does. Otherwise they get the KL term, and count.
    """

    scale: Scale = "group"
    eps: float = 1e-4
    clip: float | None = None
    combine: Literal["sum", "gdpo"] = "sum"
    ddof: Literal[0, 1] = 1
    drop_zero: bool = False

    def __post_init__(self) -> None:
        check_fields(self, eps=SMALLEST, clip=SMALLEST)


def advantages(rewards: Tensor, weights: Tensor, group: Tensor, config: AdvantageConfig) -> Tensor:
    """Return the advantage of each sample, `[B]`; zeros where there are no rewards.

    Args:
        rewards: `[B, K]`.
        weights: weight of each reward, `[K]`.
        group: index of each sample's group, `[B]`.
        config: how they are normalised and combined.
    """
    if not rewards.shape[1]:
        return rewards.new_zeros(len(rewards))
    if config.combine == "gdpo" and rewards.shape[1] > 1:
        advantage = multi_reward_advantages(rewards, weights, group, scale=config.scale, eps=config.eps, ddof=config.ddof)
    else:
        advantage = group_advantages(rewards @ weights, group, scale=config.scale, eps=config.eps, ddof=config.ddof)
    return advantage if config.clip is None else advantage.clamp(-config.clip, config.clip)
