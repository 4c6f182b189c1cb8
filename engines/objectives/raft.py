"""RAFT: flow matching on the best samples of each group."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.losses import ErrorInfo, LossConfig, add_velocity_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits
from fluvial.engines.rollout.items import NoisedSamples
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    if config.data and not config.objective.traits.offline:
        hint = "caption compares images with the same caption, data any images"
        yield UsageError("objective.compare", "rollout", "caption or data, with `data`", hint)


@dataclass(frozen=True)
class Raft:
    """Reward-ranked fine-tuning: fit the best samples of each group (RAFT, arXiv 2304.06767).

    Args:
        best: Fraction of a group that is fitted, at least one sample. Groups whose rewards are all equal are skipped.
        compare: What a group is: the samples of a prompt in a rollout; or, of given images (data) and without a rollout,
            the images of a caption (best of n), or images of any captions (supervised fine-tuning on the best of the data).
    """

    best: float = 0.25
    compare: Literal["rollout", "caption", "data"] = "rollout"

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """Given images make the objective offline."""
        return ObjectiveTraits(
            trains_on="noised",
            rewards="order",
            skips_zero=True,
            mean_over_kept=True,
            takes_kl=True,
            takes_implementation=True,
            offline=self.compare != "rollout",
            groups="prompt" if self.compare == "rollout" else self.compare,
            refuses=_refuses,
        )

    def __post_init__(self) -> None:
        check_fields(self, "objective", best=(1e-9, 1))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best samples of each group, else 0."""
        same = group == group[:, None]
        better = same & (reward > reward[:, None])
        equal = same & (reward == reward[:, None]).tril()  # among equal rewards the first sample counts as the best
        rank = better.sum(1) + equal.sum(1)  # from 1
        differs = (same & (reward != reward[:, None])).any(1)
        return ((rank <= (self.best * same.sum(1)).clamp(min=1)) & differs).to(reward.dtype)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """Return `kernels.velocity_error` of the kept samples, 0 for the others."""
        error = velocity_error(v, items.target, implementation=config.implementation)
        loss, kl = add_velocity_kl(items.target_weight * error, v, items, config)
        return loss, ErrorInfo(error.detach(), kl)
