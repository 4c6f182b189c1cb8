"""The reward of pairs: how often a sample wins against the others of its group.

Source: Pref-GRPO, arXiv 2508.20751, whose judge is a VLM (`win_rate` of `engines.extensions.judges`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fluvial.engines import plugins
from fluvial.engines.data.records import as_prompts
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import read_scores
from fluvial.engines.scoring.signature import Samples, signature_of

# (first images [P, ...], second images [P, ...], prompts) -> 1 where the first is better, 0 the second, 0.5 neither, [P]
RECORD = "metadata", "condition_images", "latents", "audio"
Judge = Callable[[Tensor, Tensor, Sequence[str]], Any]


class Pairwise:
    """Wins of a sample over the number of its comparisons, in [0, 1]; a tie is half a win.

    Each two samples of a group are compared once, the earlier one first, in one call per group. The win rates of a group
    have the mean 1/2, whatever its samples are worth; in a group of two they are 0, 1/2 or 1.

    Args:
        judge: Function `(first, second, prompts)` that returns 1 for each pair whose first image is better, 0 for the
            second, 0.5 for neither and NaN for no verdict: itself, or module:name, or a reward of the job by its name,
            whose higher score wins.
    """

    def __init__(self, judge: str | Judge, rewards: Mapping[str, Reward] | None = None) -> None:
        expected = plugins.callable_with("first", "second", "prompts")
        self.reward = (rewards or {}).get(judge) if isinstance(judge, str) else None
        lacking = [name for name in RECORD if self.reward is not None and signature_of(self.reward).takes(name)]
        if lacking:
            hint = f"{judge} needs {' and '.join(lacking)}, which are not shown to a judge"
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
            won = self.judge(images[first], images[second], [prompts[place] for place in first])
        return win_rates(torch.as_tensor(won).cpu(), len(images))


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
