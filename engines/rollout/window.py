"""Windows of stochastic steps: how often their place is drawn, how they move, and which of their steps are trained on."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.random import Key, fold_in, uniform
from fluvial.core.sigmas import moving_window, sde_steps, sde_window

WindowDraw = Literal["rollout", "call", "sample", "run"]
# The steps of a window: one set for all samples, or `[B, S]`, a row per sample.
Steps = Collection[int] | Tensor


@dataclass(frozen=True)
class WindowMoves:
    """How the window moves from noise to data as training goes on, instead of being placed at random (MixGRPO, 2507.21802).

    Args:
        every: Number of rollouts that the window stays at its first position; 0 places it at random.
        stride: Number of steps that it moves by.
        repeat: Start over after the last position that fits in the range; otherwise the window stays there.
        decay: Rate k of the decay per step: at start s it stays for ceil(every exp(-k max(0, s - decay_from))) rollouts.
        decay_from: Start from which on the decay acts.
    """

    every: int = 0
    stride: int = 1
    repeat: bool = True
    decay: float = 0.0
    decay_from: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self, "rollout.moves", every=(0, 2**31), stride=(1, 2**31), decay=(0, 1e6), decay_from=(0, 2**31)
        )  # fmt: skip
        if not self.every and (self.stride, self.repeat, self.decay, self.decay_from) != (1, True, 0.0, 0):
            raise ValueError(
                "rollout.moves is set, and rollout.moves.every is 0, so that the window does not move: set every"
            )
        if self.decay_from and not self.decay:
            raise ValueError("rollout.moves.decay_from is set, and rollout.moves.decay is 0: set decay above 0")


def windows(
    key: Key,
    done: int,
    steps: int,
    size: int,
    low: int,
    high: int,
    *,
    draw: WindowDraw = "rollout",
    contiguous: bool = True,
    moves: WindowMoves | None = None,
    group: int = 1,
    branches: int | None = None,
) -> Callable[[Sequence[int]], Steps]:
    """Return the window of the samples that are generated together, as a function of their ids.

    Args:
        key: key of the rollout's windows; with draw "run" that of the run's.
        done: number of rollouts made so far.
        steps: number of steps of the schedule.
        size, low, high: number of steps of the window, and the range that it may cover.
        draw: what one draw is for: all samples of the rollout, those generated together, each sample, or the groups at one
            index in all rollouts of the run.
        contiguous: whether the steps are contiguous.
        moves: how the window moves; None, or `every` 0, draws it.
        group: number of samples per group; with draw "run" only.
        branches: number of consecutive samples at each place of the range, one place after the other; None draws the place.
    """
    if moves is not None and moves.every:
        moved = moving_window(
            done, steps, size, low, high, every=moves.every, stride=moves.stride, repeat=moves.repeat, decay=moves.decay,
            decay_from=moves.decay_from,
        )  # fmt: skip
        return lambda ids: moved

    def drawn(key: Key) -> Collection[int]:
        return (sde_window if contiguous else sde_steps)(key, steps, size, low, high)

    if branches is not None:
        starts = range(low, high - size + 1)
        return lambda ids: torch.tensor([starts[i // branches % len(starts)] for i in ids])[:, None] + torch.arange(size)
    if draw == "rollout":
        same = drawn(key)
        return lambda ids: same
    if draw == "call":
        return lambda ids: torch.tensor([list(drawn(fold_in(key, ids[0])))] * len(ids))
    of = group if draw == "run" else 1
    return lambda ids: torch.tensor([list(drawn(fold_in(key, i // of))) for i in ids])


def trained_steps(key: Key, batch: int, recorded: int, *, trained: int, pick: Literal["random", "first"]) -> Tensor:
    """Return 1 for the recorded steps of each sample that are trained on, else 0, `[B, S]`; the same on every rank.

    Args:
        key: key of the draw.
        batch: number of samples B.
        recorded: number of recorded steps S.
        trained: how many of them are trained on.
        pick: which, see `RolloutConfig`.
    """
    if trained == recorded:
        return torch.ones(batch, recorded)
    if pick == "first":
        return (torch.arange(recorded) < trained).float().expand(batch, -1)
    drawn = uniform(fold_in(key, torch.arange(batch)), (batch, recorded))
    place = torch.argsort(torch.argsort(drawn, dim=1), dim=1)
    return (place < trained).float()
