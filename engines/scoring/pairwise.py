"""Rewards from pairwise comparisons: win rates within a group, and Bradley-Terry strengths.

Source: Pref-GRPO, arXiv 2508.20751, whose judge is a VLM (`win_rate` of `engines.extensions.judges`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.checks import check_number
from fluvial.engines import plugins
from fluvial.engines.data.records import as_prompts
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import read_scores
from fluvial.engines.scoring.signature import KNOWN, Samples, signature_of

TOLERANCE = 1e-10  # relative change of a strength at which the iteration has converged
MOST_ITERATIONS = 100_000


def bradley_terry(wins: Tensor, *, prior: float = 0.5) -> Tensor:
    """Return the log-strength of each item of a group, float64 `[n]`.

        P(i beats j) = p_i / (p_i + p_j),   theta_i = log p_i

    The strengths maximise sum_ij w_ij log P(i beats j) + a sum_i [log P(i beats 0) + log P(0 beats i)], where item 0 has the
    strength 1: each item has a wins and a losses against it. This keeps the strengths finite if an item won or lost all
    its comparisons; without any, its theta is 0. The maximum is unique, because the sum is strictly concave in theta. Each
    iteration is one of the MM algorithm,

        p_i <- (sum_j w_ij + a) / (sum_j (w_ij + w_ji) / (p_i + p_j) + 2 a / (p_i + 1))

    Args:
        wins: w_ij, how often item i was preferred to item j, `[n, n]`; a tie is half a win of each. The diagonal is 0.
        prior: a > 0, wins and losses of each item against one of strength 1.

    Raises:
        ValueError: `wins` is not a square matrix of finite numbers >= 0 with a diagonal of 0, or `prior` is not above 0.

    Source: Bradley and Terry 1952, Biometrika 39 (model); Hunter 2004, Annals of Statistics 32 (MM algorithm); Caron and
    Doucet 2012, J. Comput. Graph. Stat. 21 (virtual comparisons as a prior).
    """
    check_number("bradley_terry", "prior", prior, low=1e-3)
    w = wins.detach().double().cpu().numpy()
    if w.ndim != 2 or w.shape[0] != w.shape[1]:
        raise ValueError(f"bradley_terry: wins has shape {list(w.shape)}, expected [n, n]")
    if not (np.isfinite(w).all() and (w >= 0).all() and (w.diagonal() == 0).all()):
        raise ValueError("bradley_terry: wins holds other than finite numbers >= 0 with a diagonal of 0")
    won, compared, p = w.sum(1) + prior, w + w.T, np.ones(len(w))
    for _ in range(MOST_ITERATIONS):
        new = won / ((compared / np.add.outer(p, p)).sum(1) + 2 * prior / (p + 1))
        change, p = np.abs(new / p - 1).max(initial=0.0), new
        if change < TOLERANCE:
            break
    return torch.from_numpy(np.log(p))


SHOWN = "images", "videos", "prompts"  # inputs that a judge receives
# (first images [P, ...], second images [P, ...], prompts) -> 1 where the first is better, 0 the second, 0.5 neither, [P]
Judge = Callable[[Tensor, Tensor, Sequence[str]], Any]


class Pairwise:
    """Wins of a sample over the number of its comparisons, in [0, 1]; a tie is half a win.

    Every pair of samples in a group is compared once, the earlier one first, in one call per group. The win rates of a group
    have the mean 1/2, whatever its quality; in a group of two they are 0, 1/2 or 1.

    Args:
        judge: Function `(first, second, prompts)` that returns 1 for each pair whose first image is better, 0 for the
            second, 0.5 for neither and NaN or None for no verdict. It may also be module:name, or the name of a reward of
            the job, whose higher score wins.
    """

    def __init__(self, judge: str | Judge, rewards: Mapping[str, Reward] | None = None) -> None:
        expected = plugins.make_call_check("first", "second", "prompts")
        self.reward = (rewards or {}).get(judge) if isinstance(judge, str) else None
        hidden = {*KNOWN} - {*SHOWN}
        lacking = [] if self.reward is None else [name for name in hidden if signature_of(self.reward).takes(name)]
        if lacking:
            hint = f"{judge} needs {' and '.join(sorted(lacking))}, which are not shown to a judge"
            raise UsageError("pairwise:judge", judge, "a reward of images and prompts alone", hint)
        self.judge: Any = judge
        if isinstance(judge, str) and self.reward is None:
            self.judge = plugins.load(judge, "judges", expected, table=rewards or {})

    def __call__(self, images: Tensor, prompts: Sequence[str], group: int) -> Tensor:
        """Return the win rate of each sample of a group, `[G]`; NaN for one without a verdict."""
        if len(images) < 2:
            raise RunError(
                "pairwise compares the samples of a group, and a group has one: set `sampling.group` to 2 or more"
            )
        first, second = map(list, zip(*combinations(range(len(images)), 2), strict=True))
        if self.reward is not None:  # each image is scored once
            returned = signature_of(self.reward).call(self.reward, Samples(images, as_prompts(prompts)))
            scores = read_scores(returned, prompts, label="pairwise: the judge").scores
            better, worse = scores[first], scores[second]
            won = torch.where(better.isnan() | worse.isnan(), torch.nan, ((better - worse).sign() + 1) / 2)
        else:
            pair_prompts = [prompts[place] for place in first]
            returned = self.judge(images[first], images[second], list(pair_prompts))
            won = read_scores(returned, pair_prompts, label="pairwise: the judge").scores
            if len(wrong := won[(won < 0) | (won > 1)]):
                raise RunError(f"pairwise: the judge returned {wrong[0]:g}, expected a number from 0 to 1 per pair")
        return win_rates(won, len(images))


def win_rates(won: Tensor, count: int) -> Tensor:
    """Return the share of its comparisons that each of `count` samples won, `[count]`; NaN for one without any.

    Args:
        won: 1 where the first of two samples won, 0 the second, 0.5 neither, NaN for no comparison, `[P]` in the order of
            `itertools.combinations`.
    """
    table = torch.full((count, count), torch.nan)
    first, second = torch.triu_indices(count, count, 1)
    table[first, second], table[second, first] = won.to(table.dtype), 1 - won.to(table.dtype)
    return table.nanmean(1)
