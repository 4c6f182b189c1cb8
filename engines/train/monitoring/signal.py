"""Learning signal of a rollout: rewards within groups, advantages, and diagnostics by step."""

from typing import Any

import torch
from torch import Tensor

from fluvial.engines.fsdp.items import Parts
from fluvial.engines.rollout.items.noised import TENTHS

# Edges of the histogram of advantages; the outer bins have no end.
EDGES = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
# Diagnostics that need no splitting: the log-ratio says what the ratio does.
WHOLE = {"ratio", "log_ratio"}


def group_record(rewards: Tensor, weights: Tensor, group: int) -> dict[str, Any]:
    """Return how far rewards `[B, K]` differ within groups of consecutive samples; empty without rewards or groups.

    `reward_std` is the mean over the groups of the standard deviation of the weighted sum. `without_signal` is the share of
    groups whose samples all have the same rewards, so that advantages cannot tell them apart.
    """
    if group < 2 or not rewards.numel():
        return {}
    each = rewards.unflatten(0, (-1, group))
    equal = (each.amax(1) == each.amin(1)).all(1)
    return {
        "groups": {
            "reward_std": (each @ weights).std(1).mean().item(),
            "without_signal": equal.to(rewards.dtype).mean().item(),
        }
    }


def advantage_record(advantage: Tensor | None) -> dict[str, Any]:
    """Return the distribution of advantages `[B]`: share of zeros, standard deviation, largest size, and a histogram.

    The histogram is the share of the samples in each bin, by the lower edge of the bin, which is part of it.
    """
    if advantage is None or not len(advantage):
        return {}
    bins = torch.bucketize(advantage, torch.tensor(EDGES, dtype=advantage.dtype), right=True)
    shares = (torch.bincount(bins, minlength=len(EDGES) + 1) / len(advantage)).tolist()
    return {
        "advantage": {
            "zero": (advantage == 0).float().mean().item(),
            "std": advantage.std(correction=0).item(),
            "max_abs": advantage.abs().max().item(),
            "histogram": dict(zip(["below", *(f"{edge:g}" for edge in EDGES)], shares, strict=True)),
        }
    }


def parts_record(parts: Parts | None, *, steps: bool) -> dict[str, Any]:
    """Return the diagnostics by recorded step, or by tenth of the noise levels; parts without items are left out.

    Args:
        parts: diagnostics of an update, split by the `parts` of its items.
        steps: whether the parts are steps.
    """
    if parts is None:
        return {}
    held = {str(i) if steps else f"{i / TENTHS:g}": i for i, count in enumerate(parts.items) if count}
    found = {name: numbers for name, numbers in parts.mean.items() if name not in WHOLE}
    if "log_ratio" in parts.mean_abs:
        found["abs_log_ratio"] = parts.mean_abs["log_ratio"]
    split = {name: {part: numbers[i] for part, i in held.items()} for name, numbers in found.items()}
    return {"by_step" if steps else "by_level": split} if held else {}
