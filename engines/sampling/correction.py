"""Correction of a rollout that another program made than the update: other precision, other engine, older weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fluvial.core import correction
from fluvial.core.checks import check_fields
from fluvial.core.correction import CorrectionInfo, rollout_weights
from fluvial.engines.sampling.items import RecordedSteps, Share


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights that correct for a rollout made by another program than the update (precision, engine or weights).

    The update then computes the old log-probabilities itself, with one more forward pass, and weights each pair by what
    `core.correction` makes of their difference to the rollout's.

    Args:
        mode: What happens to a ratio of densities beyond the threshold: truncate, reject, mask; none corrects nothing.
        level: What a ratio is taken over: a step, or a whole trajectory.
        threshold: Bound of the ratio of densities, per dimension if the log-probability's reduction is mean, so near 1.
    """

    mode: Literal["none", "truncate", "reject", "mask"] = "none"
    level: correction.Level = "step"
    threshold: float = 1.01

    def __post_init__(self) -> None:
        check_fields(self, threshold=(1, 1e30))


def correct(
    items: RecordedSteps,
    log_prob: Tensor,
    recorded: Tensor,
    config: CorrectionConfig,
    *,
    share: Share,
    gather: Callable[[Tensor], Tensor],
) -> tuple[RecordedSteps, CorrectionInfo]:
    """Return a rollout's items with the update's own log-probs for the old ones, weighted; every rank must take part.

    Args:
        items: B*S pairs of this rank's `share`, step by step.
        log_prob: old log-prob of each pair, as the update computes it, `[B*S]`.
        recorded: old log-probs as the rollout recorded them, `[B, S]`.
        gather: function that joins the ranks' tensors along the batch.
    """
    assert config.mode != "none"
    own = log_prob.unflatten(0, (recorded.shape[1], -1)).T.contiguous()
    # Of all ranks, so that each has the same diagnostics.
    computed, known = (gather(values)[: share.batch] for values in (own, recorded))
    factor, info = rollout_weights(computed, known, mode=config.mode, threshold=config.threshold, level=config.level)
    # The weight is that of the policy gradient, whose loss is linear in the advantage; a KL term has no weight.
    return items._replace(log_prob_old=log_prob, target_weight=items.target_weight * share.rows(factor).T.flatten()), info
