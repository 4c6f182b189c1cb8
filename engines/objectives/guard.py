"""GRPO-Guard: a surrogate whose gradient has the same size at every step of the schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, guard_surrogate
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.clipped import SURROGATE
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl, mean_density
from fluvial.engines.objectives.protocol import the_advantage
from fluvial.engines.rollout.items import RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    rollout = config.rollout
    if not rollout.sampler.rule.std_is_a_rate and not rollout.sampler.is_deterministic:
        expected = "flow_sde or dance_sde, whose std is a rate times sqrt(|dt|), with guard"
        yield UsageError("rollout.sampler", rollout.sampler.kind, expected)
    yield from mean_density(config, "guard")


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    traits = replace(SURROGATE, compares_with=("old",), refuses=_refuses)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip=(0, 1))

    target_weight = the_advantage

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        log_prob, kl = log_prob_and_kl(v, items, config, v_ref=items.predictions.get("ref"))
        loss, info = guard_surrogate(
            log_prob,
            items.log_prob_old,
            items.target_weight,
            items.transition,
            v,
            items.predictions["old"],
            items.dt,
            clip=self.clip,
        )
        return add_step_kl(loss, info, kl, items, config)
