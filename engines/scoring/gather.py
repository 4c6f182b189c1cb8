"""The rewards of a whole rollout, the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError
from fluvial.engines.scoring.invalid import check_invalid, find_kept_samples
from fluvial.engines.scoring.runner import Collected, RewardRunners


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

    def collect(self, world: World, *, batch: int, stop: Callable[[], bool] | None = None) -> Collected:
        """Wait for the scores of this rank's samples of a batch; every rank must take part.

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


def gather_rewards(own: Collected, *, stop: bool, group: int, max_invalid: float, world: World) -> tuple[Rewards, bool]:
    """Return the rewards of a rollout, and whether any rank was asked to stop; every rank must take part.

    Args:
        stop: whether this rank was asked to stop. The request travels with the rewards, so that all ranks stop after the
            same update.
        group: number of consecutive samples that belong together.
        max_invalid: largest share of the groups that may be left out.

    Raises:
        AbandonedRolloutError: a rank was asked to stop, and did not wait for scores that a reward promised.
        RunError: more groups have no valid reward.
    """
    flags = torch.tensor([float(own.abandoned), float(stop), float(bool(own.parts))])
    everyone = world.gather(torch.cat([own.scores.flatten(), flags])[None])  # on the host: the device is not waited for
    if everyone[:, -3].any():
        raise AbandonedRolloutError("asked to stop while waiting for the scores of a rollout, which is made again on resume")
    # A sample's score is 0 on all ranks but one. The ranks of a group have the same samples.
    scores = everyone[:: world.sequence, :-3].sum(0).view_as(own.scores)
    invalid = check_invalid(scores, own.problems, group=group, most=max_invalid, world=world)
    kept = find_kept_samples(scores, group)
    numbers, parts = dict[str, list[float]](), dict[str, Any]()
    if everyone[:, -1].any():
        learnt = set(torch.nonzero(kept).flatten().tolist())
        for rank in world.gather_items(own.parts)[:: world.sequence]:
            for name, values in rank.items():
                known = [value for place, value in values.items() if place in learnt and value == value]
                numbers.setdefault(name, []).extend(known)
    for name, known in numbers.items():
        reward, _, part = name.partition("/")
        parts.setdefault(reward, {})[part] = fmean(known) if known else None
    return Rewards(scores, kept, invalid, parts, own.computed, own.waited), bool(everyone[:, -2].any())
