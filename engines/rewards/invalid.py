"""Samples without a valid score: their groups are dropped from a rollout; too many end the run."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.fsdp.world import World


def kept_samples(rewards: Tensor, group: int) -> Tensor:
    """Return whether each sample is learnt from, bool `[B]`: all rewards of its whole group are valid.

    Args:
        rewards: `[B, K]`, NaN where invalid.
        group: number of consecutive samples that belong together.
    """
    wrong = torch.isnan(rewards).any(1)
    return ~wrong.unflatten(0, (-1, group)).any(1).repeat_interleave(group)


def spread(values: Tensor, kept: Tensor) -> Tensor:
    """Return a value per kept sample as one per sample, `[B, ...]`, 0 for those that are left out.

    Args:
        values: `[sum(kept), ...]`.
        kept: bool `[B]`.
    """
    found = values.new_zeros((len(kept), *values.shape[1:]))
    found[kept] = values
    return found


def check_invalid(rewards: Tensor, problems: Sequence[str], *, group: int, most: float, world: World) -> dict[str, int]:
    """Return how many samples are invalid and how many groups are left out; every rank must take part.

    The main rank warns of what is tolerated.

    Args:
        rewards: `[B, K]` of all ranks, NaN where invalid.
        problems: reasons of this rank, a line each.
        group: number of consecutive samples that belong together.
        most: largest share of the groups of a rollout that may be left out.
        world: process group.

    Raises:
        RunError: it is more.
    """
    samples, kept = int(torch.isnan(rewards).any(1).sum()), kept_samples(rewards, group)
    groups = int((~kept).sum()) // group
    if samples:
        reason, total = _first(problems, "a reward gave no number", world), len(rewards) // group
        left = f"{groups} of the {total} groups of the rollout have no valid reward"
        with world.agreed():
            if world.is_main:
                _report(reason, left, "are left out of the update", enough=groups <= most * total, most=most)
    return {"samples": samples, "groups": groups}


def check_scores(scores: Tensor, problems: Sequence[str], *, most: float, world: World) -> Tensor:
    """Return which samples of an evaluation have all scores, bool `[N]`; every rank must take part.

    The main rank warns of those that do not.

    Args:
        scores: `[N, K]` of all ranks, NaN where invalid.
        problems: reasons of this rank, a line each.
        most: largest share of the samples that may be left out.
        world: process group.

    Raises:
        RunError: it is more, or none is left.
    """
    valid = ~torch.isnan(scores).any(1)
    count = len(valid) - int(valid.sum())
    if count:
        reason = _first(problems, "an evaluator gave no number", world)
        left = f"{count} of the {len(valid)} samples of the evaluation have no valid score"
        with world.agreed():
            if world.is_main:
                enough = count <= most * len(valid) and count < len(valid)
                _report(reason, left, "are left out of it", enough=enough, most=most)
    return valid


def _first(problems: Sequence[str], unknown: str, world: World) -> str:
    """Return the first reason of all ranks, which must all take part."""
    return next((line for lines in world.gather_items(list(problems)) for line in lines), unknown)


def _report(reason: str, left: str, then: str, *, enough: bool, most: float) -> None:
    """Warn of what is left out, or raise RunError unless what remains is enough."""
    if not enough:
        raise RunError(f"{reason}; {left}, above `max_invalid` {most:g}")
    warnings.warn(f"{reason}; {left} and {then}", stacklevel=5)
