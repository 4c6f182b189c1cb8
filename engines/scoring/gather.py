"""Rewards of a rollout, equal on all ranks; groups with an invalid reward are dropped."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import RunError
from fluvial.engines.scoring.runner import Collected, RewardRunners


def find_kept_samples(rewards: Tensor, group: int) -> Tensor:
    """Return whether each sample is trained on, bool `[B]`: all rewards of its group are valid.

    Args:
        rewards: `[B, K]`, NaN where invalid.
        group: number of consecutive samples per group.
    """
    invalid = torch.isnan(rewards).any(1)
    return ~invalid.unflatten(0, (-1, group)).any(1).repeat_interleave(group)


@collective
def check_invalid(rewards: Tensor, problems: Sequence[str], *, group: int, most: float, world: World) -> dict[str, int]:
    """Return the number of invalid samples and of dropped groups.

    The main rank warns if there are any.

    Args:
        rewards: `[B, K]` of all ranks, NaN where invalid.
        problems: this rank's reasons, one line each.
        group: number of consecutive samples per group.
        most: largest tolerated share of dropped groups in a rollout.

    Raises:
        RunError: the share is larger.
    """
    samples, groups = int(torch.isnan(rewards).any(1).sum()), int((~find_kept_samples(rewards, group)).sum()) // group
    if samples:
        reason, total = _gather_reason(problems, "a reward gave no number", world), len(rewards) // group
        text = f"{reason}; {groups} of the {total} groups of the rollout have no valid reward"
        _warn_or_raise(text, "are left out of the update", share=groups / total, most=most, world=world)
    return {"samples": samples, "groups": groups}


@collective
def check_scores(scores: Tensor, problems: Sequence[str], *, most: float, world: World) -> Tensor:
    """Return whether each sample of an evaluation has all scores, bool `[N]`.

    The main rank warns if any has not.

    Args:
        scores: `[N, K]` of all ranks, NaN where invalid.
        problems: this rank's reasons, one line each.
        most: largest tolerated share of dropped samples.

    Raises:
        RunError: the share is larger, or no sample is valid.
    """
    valid = ~torch.isnan(scores).any(1)
    if count := int((~valid).sum()):
        reason = _gather_reason(problems, "an evaluator gave no number", world)
        text = f"{reason}; {count} of the {len(valid)} samples of the evaluation have no valid score"
        _warn_or_raise(text, "are left out of it", share=count / len(valid), most=most, world=world)
    return valid


def _gather_reason(problems: Sequence[str], unknown: str, world: World) -> str:
    """Return the first reason of any rank; every rank must call it."""
    return next((line for lines in world.gather_items(list(problems)) for line in lines), unknown)


def _warn_or_raise(text: str, consequence: str, *, share: float, most: float, world: World) -> None:
    """Warn of dropped samples on the main rank; raise RunError if they are too many, or all."""
    with world.agreed():
        if world.is_main:
            if share > most or share == 1:
                raise RunError(f"{text}, above `rollout.max_invalid` {most:g}")
            warnings.warn(f"{text} and {consequence}", stacklevel=4)


class AbandonedRolloutError(RunError):
    """The run was stopped while it waited for scores; the rollout has not been trained on."""


@dataclass
class Scoring:
    """Scores of this rank's samples, computed on the threads of the rewards.

    Args:
        runners: threads of the rewards.
        collected: scores, if they were already waited for.
    """

    runners: RewardRunners
    collected: Collected | None = None

    @collective
    def collect(self, world: World, *, batch: int, stop: Callable[[], bool] | None = None) -> Collected:
        """Wait for the scores of this rank's samples of a batch.

        Args:
            batch: number of samples over all ranks.
            stop: function that returns whether this rank should stop; pending scores are then not awaited.
        """
        if self.collected is None:
            self.runners.exchange(world)
            with world.agreed():
                self.collected = self.runners.collect(batch=batch, **({} if stop is None else {"stop": stop}))
        return self.collected

    def replace(self, other: "Scoring", replaced: Tensor) -> "Scoring":
        """Return scores with those of `other` for the replaced samples; both must be collected.

        Args:
            replaced: whether a sample is replaced, over all ranks, bool `[B]`.
        """
        old, new = self.collected, other.collected
        assert old is not None
        assert new is not None
        parts = {
            name: {place: value for place, value in values.items() if not replaced[place]}
            for name, values in old.parts.items()
        }
        for name, values in new.parts.items():
            parts.setdefault(name, {}).update(values)
        collected = Collected(
            torch.where(replaced[:, None], new.scores, old.scores),
            parts,
            [*old.problems, *new.problems],
            old.computed + new.computed,
            old.waited + new.waited,
            old.abandoned or new.abandoned,
        )
        return Scoring(self.runners, collected)


class Rewards(NamedTuple):
    """The rewards of a rollout of B samples."""

    scores: Tensor  # [B, K] on the host, NaN where invalid
    kept: Tensor  # bool [B], whether a sample is trained on: its group has valid rewards
    invalid: dict[str, int]  # number of samples without a valid reward, and of dropped groups
    parts: dict[str, Any]  # mean of each additional score, by reward and name
    computed: float = 0.0  # compute time of this rank's rewards, in seconds
    waited: float = 0.0  # time that this rank waited for them, in seconds


@collective
def gather_rewards(local: Collected, *, stop: bool, group: int, max_invalid: float, world: World) -> tuple[Rewards, bool]:
    """Return the rewards of a rollout, and whether any rank should stop.

    Args:
        stop: whether this rank should stop. The flag is gathered with the rewards, so that all ranks stop after the same
            update.
        group: number of consecutive samples per group.
        max_invalid: largest tolerated share of dropped groups.

    Raises:
        AbandonedRolloutError: a rank was stopped, and did not wait for pending scores.
        RunError: more groups are dropped.
    """
    flags = torch.tensor([float(local.abandoned), float(stop), float(bool(local.parts))])
    everyone = world.gather(torch.cat([local.scores.flatten(), flags])[None])  # on the host, without waiting for the device
    if everyone[:, -3].any():
        raise AbandonedRolloutError("asked to stop while waiting for the scores of a rollout, which is made again on resume")
    # A sample's score is 0 on all ranks but one. The ranks of a group have the same samples.
    scores = everyone[:: world.sequence, :-3].sum(0).view_as(local.scores)
    invalid = check_invalid(scores, local.problems, group=group, most=max_invalid, world=world)
    kept = find_kept_samples(scores, group)
    numbers, parts = dict[str, list[float]](), dict[str, Any]()
    if everyone[:, -1].any():
        trained = set(torch.nonzero(kept).flatten().tolist())
        for rank in world.gather_items(local.parts)[:: world.sequence]:
            for name, values in rank.items():
                valid = [value for place, value in values.items() if place in trained and value == value]
                numbers.setdefault(name, []).extend(valid)
    for name, valid in numbers.items():
        reward, _, part = name.partition("/")
        parts.setdefault(reward, {})[part] = fmean(valid) if valid else None
    return Rewards(scores, kept, invalid, parts, local.computed, local.waited), bool(everyone[:, -2].any())
