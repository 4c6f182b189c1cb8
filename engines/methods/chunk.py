"""Chunk-GRPO: GRPO with one ratio per chunk of steps, or per sample."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fluvial.core.policy import share_ratio
from fluvial.engines.methods.grpo import Grpo
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Items


@dataclass(frozen=True)
class ChunkGrpo(Grpo, name="chunk"):
    """GRPO with one ratio and clip per chunk of consecutive steps, see `core.policy.share_ratio`.

    The mean log-ratio of several steps is less noisy than a single one, so fewer steps are clipped by chance. It costs one
    more forward pass per update.

    Args:
        chunk: Number of consecutive recorded steps that share a ratio; None takes all steps of a sample, as in GSPO.
    """

    bounds: ClassVar = {**Grpo.bounds, "chunk": (1, 2**31)}
    splits_guidance = False  # the loss must have the bits of the guided prediction, on which ratios are measured
    chunk: int | None = None

    def couple_steps(self, run: "Run", part: "Items") -> "Items":
        """Return the steps of an update with old log-probabilities that give each step the ratio of its chunk."""
        log_prob = run.measure(part, self.log_prob)
        new, old = (run.gather(part, values) for values in (log_prob, part.rows.log_prob_old))
        used = to_device((part.used != 0).to(new.dtype), new.device)
        shared = part.look_up(share_ratio(new, old, used, size=self.chunk))
        # Padding rows have no entry in the tables; their ratio is 1.
        return part.with_rows(log_prob_old=torch.where(part.look_up(used) > 0, shared, log_prob))
