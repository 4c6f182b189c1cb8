"""The rewards of a whole rollout, the same on every rank; groups with a sample without a valid one are dropped."""

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
    """Return whether each sample is learnt from, bool `[B]`: all rewards of its whole group are valid.

    Args:
        rewards: `[B, K]`, NaN where invalid.
        group: number of consecutive samples that belong together.
    """
    wrong = torch.isnan(rewards).any(1)
    return ~wrong.unflatten(0, (-1, group)).any(1).repeat_interleave(group)


@collective
def check_invalid(rewards: Tensor, problems: Sequence[str], *, group: int, most: float, world: World) -> dict[str, int]:
    """Return how many samples are invalid and how many groups are left out.

    The main rank warns of what is tolerated.

    Args:
        rewards: `[B, K]` of all ranks, NaN where invalid.
        problems: reasons of this rank, a line each.
        group: number of consecutive samples that belong together.
        most: largest share of the groups of a rollout that may be left out.

    Raises:
        RunError: it is more.
    """
    samples, groups = int(torch.isnan(rewards).any(1).sum()), int((~find_kept_samples(rewards, group)).sum()) // group
    if samples:
        reason, total = _first(problems, "a reward gave no number", world), len(rewards) // group
        left = f"{reason}; {groups} of the {total} groups of the rollout have no valid reward"
        _report(left, "are left out of the update", share=groups / total, most=most, world=world)
    return {"samples": samples, "groups": groups}


@collective
def check_scores(scores: Tensor, problems: Sequence[str], *, most: float, world: World) -> Tensor:
    """Return which samples of an evaluation have all scores, bool `[N]`.

    The main rank warns of those that do not.

    Args:
        scores: `[N, K]` of all ranks, NaN where invalid.
        problems: reasons of this rank, a line each.
        most: largest share of the samples that may be left out.

    Raises:
        RunError: it is more, or none is left.
    """
    valid = ~torch.isnan(scores).any(1)
    if count := int((~valid).sum()):
        reason = _first(problems, "an evaluator gave no number", world)
        left = f"{reason}; {count} of the {len(valid)} samples of the evaluation have no valid score"
        _report(left, "are left out of it", share=count / len(valid), most=most, world=world)
    return valid


def _first(problems: Sequence[str], unknown: str, world: World) -> str:
    """Return the first reason of all ranks, which must all take part."""
    return next((line for lines in world.gather_items(list(problems)) for line in lines), unknown)


def _report(left: str, then: str, *, share: float, most: float, world: World) -> None:
    """Warn of what is left out on the main rank, or raise RunError if it is too much, or all."""
    with world.agreed():
        if world.is_main:
            if share > most or share == 1:
                raise RunError(f"{left}, above `rollout.max_invalid` {most:g}")
            warnings.warn(f"{left} and {then}", stacklevel=4)


class AbandonedRolloutError(RunError):
    """The run was asked to stop while it waited for scores; nothing has been learnt from the rollout."""


@dataclass
class Scoring:
    """The scores of this rank's samples, which rewards compute on their own threads.

    Args:
        runners: threads of the rewards.
        collected: what they said, where they were waited for already.
    """

    runners: RewardRunners
    collected: Collected | None = None

    @collective
    def collect(self, world: World, *, batch: int, stop: Callable[[], bool] | None = None) -> Collected:
        """Wait for the scores of this rank's samples of a batch.

        Args:
            batch: number of samples, of all ranks.
            stop: whether this rank was asked to stop; then scores that a reward promised are not waited for.
        """
        if self.collected is None:
            self.runners.exchange(world)
            with world.agreed():
                self.collected = self.runners.collect(batch=batch, **({} if stop is None else {"stop": stop}))
        return self.collected

    def replace(self, other: "Scoring", replaced: Tensor) -> "Scoring":
        """Return scores with those of other samples in place of some; both are there.

        Args:
            replaced: which samples, of all ranks, bool `[B]`.
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
    kept: Tensor  # bool [B], whether a sample is learnt from: its whole group has valid rewards
    invalid: dict[str, int]  # number of samples without a valid reward, and of the groups that are left out
    parts: dict[str, Any]  # mean of each further number that a reward returned, by reward and name
    computed: float = 0.0  # seconds that this rank's rewards computed
    waited: float = 0.0  # seconds that this rank waited for their end


@collective
def gather_rewards(local: Collected, *, stop: bool, group: int, max_invalid: float, world: World) -> tuple[Rewards, bool]:
    """Return the rewards of a rollout, and whether any rank was asked to stop.

    Args:
        stop: whether this rank was asked to stop. The request travels with the rewards, so that all ranks stop after the
            same update.
        group: number of consecutive samples that belong together.
        max_invalid: largest share of the groups that may be left out.

    Raises:
        AbandonedRolloutError: a rank was asked to stop, and did not wait for scores that a reward promised.
        RunError: more groups have no valid reward.
    """
    flags = torch.tensor([float(local.abandoned), float(stop), float(bool(local.parts))])
    everyone = world.gather(torch.cat([local.scores.flatten(), flags])[None])  # on the host: the device is not waited for
    if everyone[:, -3].any():
        raise AbandonedRolloutError("asked to stop while waiting for the scores of a rollout, which is made again on resume")
    # A sample's score is 0 on all ranks but one. The ranks of a group have the same samples.
    scores = everyone[:: world.sequence, :-3].sum(0).view_as(local.scores)
    invalid = check_invalid(scores, local.problems, group=group, most=max_invalid, world=world)
    kept = find_kept_samples(scores, group)
    numbers, parts = dict[str, list[float]](), dict[str, Any]()
    if everyone[:, -1].any():
        learnt = set(torch.nonzero(kept).flatten().tolist())
        for rank in world.gather_items(local.parts)[:: world.sequence]:
            for name, values in rank.items():
                known = [value for place, value in values.items() if place in learnt and value == value]
                numbers.setdefault(name, []).extend(known)
    for name, known in numbers.items():
        reward, _, part = name.partition("/")
        parts.setdefault(reward, {})[part] = fmean(known) if known else None
    return Rewards(scores, kept, invalid, parts, local.computed, local.waited), bool(everyone[:, -2].any())
