"""Rewards as functions with a gradient, for objectives that follow it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fluvial.engines.errors import UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import SCORE
from fluvial.engines.scoring.signature import Samples, signature_of


def weighted_sum(rewards: Mapping[str, tuple[Reward, float]], samples: Samples, *, objective: str) -> Tensor:
    """Return the weighted sum of rewards of samples, `[B]`, with gradient.

    Args:
        objective: name of what follows the gradient, for messages.

    Raises:
        UsageError: a reward gives no gradient.
    """
    total = torch.zeros(len(samples.prompts), device=samples.images.device)
    for name, (reward, weight) in rewards.items():
        found = signature_of(reward).call(reward, samples)
        scores = found.get(SCORE) if isinstance(found, Mapping) else found
        if (
            not isinstance(scores, Tensor)
            or scores.shape != total.shape
            or (torch.is_grad_enabled() and not scores.requires_grad)
        ):
            raise UsageError(
                f"reward {name!r} gives no gradient, and {objective} follows it: expected PyTorch operations on the images, "
                f"and a tensor [{len(total)}]"
            )
        total = total + weight * scores
    return total
