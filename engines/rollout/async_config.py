"""How far rollouts may be ahead of the updates."""

from dataclasses import dataclass

from fluvial.core.checks import check_fields


@dataclass(frozen=True)
class AsyncConfig:
    """Rollouts that are made while earlier ones are learnt from.

    Args:
        ahead: Number K of rollouts that are made ahead: rollout j is made with the weights that rollouts 0 to j - K - 1 have
            trained, whatever the timing. 0 makes each rollout with the current weights. From 1 on, samples come from
            `rollout.source`, or from a second copy of the network in this process; objectives with ratios of
            log-probabilities need `correction`.
    """

    ahead: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "asynchronous", ahead=(0, 64))
