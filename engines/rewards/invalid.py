"""Samples without a valid score: their groups are left out of a rollout, and the run stops where these are too many."""

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
        reasons = [line for lines in world.gather_items(list(problems)) for line in lines]
        reason = reasons[0] if reasons else "a reward gave no number"
        total = len(rewards) // group
        with world.agreed():
            if world.is_main:
                _report(reason, groups, total, most)
    return {"samples": samples, "groups": groups}


def _report(reason: str, groups: int, total: int, most: float) -> None:
    """Warn of the groups that are left out, or raise RunError if they are too many."""
    left = f"{groups} of the {total} groups of the rollout have no valid reward"
    if groups > most * total:
        raise RunError(f"{reason}; {left}, above max_invalid {most:g}")
    warnings.warn(f"{reason}; {left} and are left out of the update", stacklevel=5)
