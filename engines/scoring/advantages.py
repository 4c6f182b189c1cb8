"""Advantages: rewards relative to the other samples of their group, or to earlier rewards of their prompt."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.advantages import Scale, group_advantages, multi_reward_advantages
from fluvial.core.checks import check_fields
from fluvial.engines.choices import refuse_unused
from fluvial.engines.errors import UsageError

# Lagrange multiplier per reward with a floor; saved in checkpoints.
Multipliers = dict[str, float]


def parse_floors(texts: Sequence[str], *, field: str) -> dict[str, float]:
    """Return floors by the name of the reward, from texts `name=floor`.

    Raises:
        UsageError: a text is not a name and a number, or a name is repeated.
    """
    floors: dict[str, float] = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        try:
            floor = float(value)
        except ValueError:
            floor = math.nan
        if not name or not separator or not math.isfinite(floor):
            raise UsageError(f"`{field}` holds {text!r}, expected the name of a reward and a number, e.g. ocr=0.8")
        if name in floors:
            raise UsageError(f"`{field}` names {name!r} twice: name each reward once")
        floors[name] = floor
    return floors


def update_multipliers(
    multipliers: Mapping[str, float], means: Mapping[str, float], floors: Mapping[str, float], *, lr: float, most: float
) -> Multipliers:
    """Return the multipliers of rewards with floors, updated after a rollout; missing ones start at 0.

        maximise E[r]  subject to  E[c_k] >= f_k        L = E[r] + sum_k lambda_k (E[c_k] - f_k)
        lambda_k <- clip(lambda_k + lr (f_k - mean c_k), 0, most)

    The policy maximises L at the current multipliers, where c_k is a reward of weight lambda_k. Each multiplier takes a
    descent step on L after every rollout (as in RCPO, arXiv 1805.11074).

    Args:
        multipliers: previous multipliers, by name of the reward.
        means: mean of each reward over the rollout.
        lr: step size, per unit of the reward.
    """
    return {
        name: min(max(multipliers.get(name, 0.0) + lr * (floor - means[name]), 0.0), most) for name, floor in floors.items()
    }


def learnt_weights(weights: Tensor, names: Sequence[str], multipliers: Mapping[str, float]) -> Tensor:
    """Return the weight of each reward in the advantage, `[K]`; for a reward with a floor it is the multiplier."""
    return torch.tensor([multipliers.get(name, weight) for name, weight in zip(names, weights.tolist(), strict=True)])


SMALLEST = (1e-12, 1e30)

# Recent rewards per prompt, oldest first; saved in checkpoints.
History = dict[str, list[float]]


@dataclass(frozen=True)
class AdvantageConfig:
    """Conversion of rewards to advantages.

    Args:
        scale: Standard deviation by which a reward's distance to its group's mean is divided: group (of its group), batch
            (of all samples of the rollout) or none.
        eps: Number added to that standard deviation, in the unit of the reward.
        clip: Bound of the advantages, which are clipped to [-clip, clip]; None does not clip.
        combine: Combination of several rewards into one advantage: sum (of the weighted rewards), gdpo (each reward is
            normalised in its group, then weighted, then normalised over the batch, arXiv 2601.05242) or advantages (each
            reward is normalised in its group, then weighted, as in MixGRPO's code).
        ddof: Delta degrees of freedom of the standard deviations: 1 (unbiased) or 0 (of the population, numpy's default, as
            in Flow-GRPO's code).
        drop_zero: Exclude samples with advantage 0 from the loss, its KL term and the count that it is averaged over, as
            Flow-GRPO's code does. Otherwise they have the KL term, and count.
        rescale: Bound to which clipped advantages are scaled, A rescale / clip (AWM's code divides by the clip); None does
            not scale.
        extremes: Number of the best and of the worst samples per group that are trained on, by the weighted sum of their
            rewards (DanceGRPO's code for HunyuanVideo uses 4 and 4 of 24); the others only count in their group's mean.
            0 trains on all.
        history: Number of recent rewards per prompt, over past rollouts, whose mean and standard deviation normalise its
            rewards instead of its group's (DDPO's code); 0 uses the group's.
        history_min: Number of rewards of a prompt below which the rewards of all samples of the rollout are used instead.
        floors: Rewards that are constrained to a floor instead of being maximised, as name=floor, e.g. ocr=0.8. Each gets a
            Lagrange multiplier as its weight, which rises while its mean over a rollout is below the floor and falls, down
            to 0, while it is above.
        floor_lr: Step size of the multipliers: their change per rollout and unit of the reward.
        floor_max: Largest multiplier of a reward that has a floor.
    """

    scale: Scale = "group"
    eps: float = 1e-4
    clip: float | None = None
    combine: Literal["sum", "gdpo", "advantages"] = "sum"
    ddof: Literal[0, 1] = 1
    drop_zero: bool = False
    rescale: float | None = None
    extremes: int = 0
    history: int = 0
    history_min: int = 16
    floors: tuple[str, ...] = ()
    floor_lr: float = 0.1
    floor_max: float = 10.0

    @property
    def floor_of(self) -> dict[str, float]:
        """Floors by the name of the reward."""
        return parse_floors(self.floors, field="advantage.floors")

    def __post_init__(self) -> None:
        check_fields(
            self,
            eps=SMALLEST,
            clip=SMALLEST,
            rescale=SMALLEST,
            extremes=(0, 2**31),
            history=(0, 2**31),
            history_min=(2, 2**31),
            floor_lr=SMALLEST,
            floor_max=SMALLEST,
        )
        parse_floors(self.floors, field="advantage.floors")
        refuse_unused(self, "advantage.")
        if self.floors and self.history:
            hint = "the multipliers of `advantage.floors` change what is learnt from between the rollouts that it compares"
            raise UsageError("advantage.history", self.history, "0", hint)
        if not self.history:
            return
        if self.history_min > self.history:
            hint = "a prompt's own rewards would never be taken"
            raise UsageError("advantage.history_min", self.history_min, f"at most `advantage.history` {self.history}", hint)
        if self.scale != "group" or self.combine != "sum":
            expected = "0, or `advantage.scale` group and combine sum"
            hint = "it normalises the weighted sum of the rewards per prompt"
            raise UsageError("advantage.history", self.history, expected, hint)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        for name in () if self.floors else ("floor_lr", "floor_max"):
            yield name, "without `advantage.floors`"
        if self.clip is None:
            yield "rescale", "with `advantage.clip` None, which it scales"
        if not self.history:
            yield "history_min", "with `advantage.history` 0"


def weigh_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of rewards, `[..., K] -> [...]`.

    Equal rewards have bit-identical sums at any position. A matrix product rounds its last rows differently, so that a group
    of equal rewards would have a best sample.
    """
    total = rewards.new_zeros(rewards.shape[:-1])
    for reward, weight in zip(rewards.unbind(-1), weights.unbind(), strict=True):
        total = total + weight * reward
    return total


class Grades(NamedTuple):
    """Rewards, advantages and keep mask of N samples, `[N]` each, on the host."""

    reward: Tensor  # weighted sum of the rewards
    advantage: Tensor  # [N, S] with rewards per step
    keep: Tensor  # 1 for samples that the loss is averaged over, else 0


def grade(
    rewards: Tensor,
    weights: Tensor,
    group: Tensor,
    config: AdvantageConfig,
    *,
    gains: Tensor | None = None,
    prompts: Sequence[str] = (),
    history: History,
) -> Grades:
    """Return the reward and the advantage of each sample, and which samples are trained on.

    Args:
        rewards: `[N, K]`.
        weights: weight of each reward, `[K]`.
        group: index of each sample's group, `[N]`.
        config: settings of the advantages.
        gains: reward of each step, `[N, S]`, or None. With it advantages are per step, relative to the same step of the
            group's samples.
        prompts: prompt of each sample, `[N]`, read if `config.history` is set.
        history: recent rewards per prompt; those of these samples are added if `config.history` is set.
    """
    reward = weigh_rewards(rewards, weights)
    if gains is not None:
        unit_weight = torch.ones(1)
        advantage = torch.stack([advantages(gain[:, None], unit_weight, group, config) for gain in gains.unbind(1)], dim=1)
    elif config.history:
        advantage = history_advantages(reward, prompts, history, config)
    else:
        advantage = advantages(rewards, weights, group, config)
    keep = extreme(reward, group, config.extremes)
    if config.drop_zero:
        keep = keep * (advantage != 0).reshape(len(keep), -1).any(1).to(keep.dtype)
    return Grades(reward, advantage, keep)


def advantages(rewards: Tensor, weights: Tensor, group: Tensor, config: AdvantageConfig) -> Tensor:
    """Return the advantage of each sample, `[B]`; zeros without rewards.

    Rewards are `[B, K]`, weights one per reward, `[K]`, and `group` is the index of each sample's group, `[B]`.
    """
    if not rewards.shape[1]:
        return rewards.new_zeros(len(rewards))
    normalised = partial(group_advantages, group=group, scale=config.scale, eps=config.eps, ddof=config.ddof)
    if config.combine == "gdpo" and rewards.shape[1] > 1:
        advantage = multi_reward_advantages(rewards, weights, group, scale=config.scale, eps=config.eps, ddof=config.ddof)
    elif config.combine == "advantages":
        advantage = weigh_rewards(torch.stack([normalised(reward) for reward in rewards.unbind(1)], dim=1), weights)
    else:
        advantage = normalised(weigh_rewards(rewards, weights))
    return clip_advantages(advantage, config)


def extreme(reward: Tensor, group: Tensor, count: int) -> Tensor:
    """Return 1 for the `count` best and the `count` worst samples of each group, else 0, `[B]`; all 1 for count 0.

    Ties are broken by the order in the batch. `group` is the index of each sample's group, `[B]`.
    """
    if not count:
        return torch.ones_like(reward)
    picked = torch.zeros_like(reward)
    for number in group.unique():
        members = torch.nonzero(group == number).flatten()
        order = members[reward[members].argsort(stable=True)]
        picked[order[:count]] = picked[order[-count:]] = 1.0
    return picked


def clip_advantages(advantage: Tensor, config: AdvantageConfig) -> Tensor:
    """Return advantages clipped to [-clip, clip], and scaled to `rescale`, as configured."""
    if config.clip is None:
        return advantage
    clipped = advantage.clamp(-config.clip, config.clip)
    return clipped if config.rescale is None else clipped * (config.rescale / config.clip)


def history_advantages(reward: Tensor, prompts: Sequence[str], history: History, config: AdvantageConfig) -> Tensor:
    """Return advantages relative to the recent rewards of each prompt, `[B]`, and add the rewards to the history.

        A = (r - mean_p) / (std_p + eps)

    mean_p and std_p are over the last `config.history` rewards of the prompt, including this rollout. With fewer than
    `config.history_min` rewards, they are over all samples of the rollout.

    The rewards, `[B]`, are equal on all ranks, and `history` is changed in place.

    Source: DDPO, arXiv 2305.13301, and its published code.
    """
    reward64 = reward.to(torch.float64)
    for prompt, value in zip(prompts, reward64.tolist(), strict=True):
        recent = history.setdefault(prompt, [])
        recent.append(value)
        del recent[: -config.history]

    def moments(prompt: str) -> tuple[float, float]:
        recent = history[prompt]
        rewards = torch.tensor(recent, dtype=torch.float64) if len(recent) >= config.history_min else reward64
        return float(rewards.mean()), float(rewards.std(correction=min(config.ddof, len(rewards) - 1)))

    by_prompt = {prompt: moments(prompt) for prompt in dict.fromkeys(prompts)}
    mean, std = torch.tensor([by_prompt[prompt] for prompt in prompts], dtype=torch.float64).reshape(-1, 2).unbind(1)
    return clip_advantages(((reward64 - mean) / (std + config.eps)).to(reward.dtype), config)
