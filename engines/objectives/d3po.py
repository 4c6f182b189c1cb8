"""D3PO: preferences between the samples of a group, as preferences between their recorded steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.dpo import D3poInfo, best_and_worst, clipped_log_ratio, d3po_loss
from fluvial.engines.errors import UsageError
from fluvial.engines.objectives.losses import LossConfig, log_prob_and_kl
from fluvial.engines.objectives.protocol import ObjectiveTraits
from fluvial.engines.rollout.items import RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.train.config import TrainConfig


def _refuses(config: "TrainConfig") -> Iterator[UsageError]:
    rollout = config.rollout
    if rollout.sampler.is_deterministic:
        expected = "ddim or flow_sde, whose steps have the log-probability that d3po needs"
        yield UsageError("rollout.sampler", rollout.sampler.kind, expected)
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "d3po's pairs belong together in one update")
    if rollout.trained.kind == "random":
        yield UsageError("rollout.trained", "random", "all or first", "d3po compares both samples at the same steps")
    if config.kl.coef > 0:
        hint = "d3po has the reference in its loss already; `objective.beta` weighs it"
        yield UsageError("kl.coef", config.kl.coef, "0", hint)


@dataclass(frozen=True)
class D3po:
    """D3PO's loss: a preference between the best and the worst sample of a group, step by step (arXiv 2311.13231).

        -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))),  rho = p(x_next | x) / p_ref(x_next | x)

    Args:
        beta: Inverse temperature of the preference, without a unit.
        eps: Half-width of the clip of the ratio to the reference, which is per dimension.
    """

    beta: float = 0.1
    eps: float = 0.1
    traits = ObjectiveTraits(
        trains_on="steps",
        compares_with=("ref",),
        rewards="order",
        skips_zero=True,
        mean_over_kept=True,
        takes_implementation=True,
        gathers=True,
        refuses=_refuses,
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), eps=(1e-12, 1 - 1e-6))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best sample of each group, -1 for the worst, else 0; groups with equal rewards have none."""
        found = best_and_worst(reward, group)
        out = torch.zeros_like(reward)
        out[found.win[found.valid]] = 1.0
        out[found.lose[found.valid]] = -1.0
        return out

    def statistic(self, v: Tensor, items: RecordedSteps) -> Tensor:
        """Return the clipped log-ratio of each step to the reference's."""
        return self._log_ratio(v, items, LossConfig())

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the clipped log-ratio of the other sample of each pair, `[B, S]`, 0 without a pair."""
        pairs = (group[:, None] == group) & (target_weight[:, None] * target_weight == -1)
        return pairs.to(statistic.dtype) @ statistic

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        own, other, preferred = self._log_ratio(v, items, config), items.context, items.target_weight
        assert other is not None
        loss = d3po_loss(own, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (own - other)).detach()
        edge = (own.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * own.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def _log_ratio(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> Tensor:
        both = v, items.predictions["ref"]
        log_prob, reference = (log_prob_and_kl(each, items, config, v_ref=None)[0] for each in both)
        return clipped_log_ratio(log_prob, reference, eps=self.eps)
