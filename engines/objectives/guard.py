"""GRPO-Guard: a surrogate whose gradient has the same size at every step of the schedule."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.policy import PolicyInfo, guard_surrogate
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig, add_step_kl, log_prob_and_kl, recorded_step
from fluvial.engines.objectives.protocol import ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items, given


def _refuses(config: RunSettings) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.rule.std_is_a_rate and not rollout.is_deterministic:
        yield (
            f"rollout.sampler is {rollout.sampler_name}, and guard needs one whose std is a rate times sqrt(|dt|): use "
            "flow_sde or dance_sde"
        )
    if rollout.form == "unscaled" or rollout.reduction != "mean":
        yield (
            f"rollout.form is {rollout.form} and rollout.reduction is {rollout.reduction}, and guard takes a mean "
            "log-density: use form density or no_const, and reduction mean"
        )


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    traits = ObjectiveTraits(
        trains_on="steps", compares_with=("old",), has_ratio=True, skips_zero=True, takes_kl=True,
        takes_implementation=True, refuses=_refuses,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip=(0, 1))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return the advantage."""
        return advantage

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        step = recorded_step(items, transition)
        log_prob, kl = log_prob_and_kl(v, items, step, config)
        loss, info = guard_surrogate(
            log_prob, step.log_prob_old, items.target_weight, step.transition, v, given(items.v_old), step.dt, clip=self.clip
        )
        return add_step_kl(loss, info, kl, step, config)
