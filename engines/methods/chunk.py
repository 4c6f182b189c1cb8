"""GRPO with one ratio for several steps of a sample, or for all of them."""

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
    """GRPO whose ratio and clip are those of a chunk of consecutive steps, see `core.policy.share_ratio`.

    The mean log-ratio of several steps is less noisy than that of one, so that fewer clips are chance. It costs one more
    forward pass of each update.

    Args:
        chunk: Number of consecutive recorded steps that share a ratio; None takes all of a sample, as GSPO does of a text.
    """

    bounds: ClassVar = {**Grpo.bounds, "chunk": (1, 2**31)}
    splits_guidance = False  # the ratios are measured on the guided prediction, whose bits the loss must have
    chunk: int | None = None

    def couple_steps(self, run: "Run", part: "Items") -> "Items":
        """Return the steps of an update with old log-probabilities that give each the ratio of its chunk."""
        now = run.measure(part, self.log_prob)
        new, old = (run.gather(part, values) for values in (now, part.rows.log_prob_old))
        used = to_device((part.used != 0).to(new.dtype), new.device)
        shared = part.look_up(share_ratio(new, old, used, size=self.chunk))
        # A row that only fills a pass is in no table; its ratio is 1.
        return part.with_rows(log_prob_old=torch.where(part.look_up(used) > 0, shared, now))
