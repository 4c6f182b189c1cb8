"""How diverse the samples of a group are: a diagnostic against reward hacking."""

import torch
from torch import Tensor

SIDE = 32  # pixels of a thumbnail


def thumbnails(images: Tensor) -> Tensor:
    """Return images `[B, C, H, W]` averaged to at most 32 pixels a side and flattened, `[B, D]`."""
    height, width = (min(side, SIDE) for side in images.shape[-2:])
    return torch.nn.functional.adaptive_avg_pool2d(images.flatten(1, -3).float(), (height, width)).flatten(1)


def diversity(thumbnails: Tensor, group: int) -> float:
    """Return the mean over all groups of the root-mean-square distance between two samples of a group.

    It falls when a policy draws the same image again and again. Compare it within a run, where the sampler is the same.

    Args:
        thumbnails: `[B, D]`, ordered by group.
        group: samples per group, at least 2.
    """
    by_group = thumbnails.double().unflatten(0, (-1, group))
    distance = torch.cdist(by_group, by_group) / thumbnails.shape[1] ** 0.5
    return float(distance.sum((1, 2)).mean() / (group * (group - 1)))
