"""Samples without a valid score: their groups are dropped from a rollout; too many end the run."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.engine.world import World
from fluvial.engines.errors import RunError


def find_kept_samples(rewards: Tensor, group: int) -> Tensor:
    """Return whether each sample is learnt from, bool `[B]`: all rewards of its whole group are valid.

    Args:
        rewards: `[B, K]`, NaN where invalid.
        group: number of consecutive samples that belong together.
    """
    wrong = torch.isnan(rewards).any(1)
    return ~wrong.unflatten(0, (-1, group)).any(1).repeat_interleave(group)


def check_invalid(rewards: Tensor, problems: Sequence[str], *, group: int, most: float, world: World) -> dict[str, int]:
    """Return how many samples are invalid and how many groups are left out; every rank must take part.

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


def check_scores(scores: Tensor, problems: Sequence[str], *, most: float, world: World) -> Tensor:
    """Return which samples of an evaluation have all scores, bool `[N]`; every rank must take part.

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
