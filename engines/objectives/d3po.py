"""D3PO: preferences between the samples of a group, as preferences between their recorded steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.dpo import D3poInfo, best_and_worst, clipped_log_ratio, d3po_loss
from fluvial.core.transitions import Transition
from fluvial.engines.objectives.losses import LossConfig, recorded_step
from fluvial.engines.objectives.protocol import ObjectiveTraits, RunSettings
from fluvial.engines.rollout.items import Items, given
from fluvial.kernels import step_log_prob


def _refuses(config: RunSettings) -> Iterator[str]:
    rollout = config.rollout
    if rollout.is_deterministic:
        yield (
            f"rollout.sampler is {rollout.sampler_name}, and d3po needs the log-probability of each step, which "
            "deterministic steps have not: use ddim or flow_sde"
        )
    if config.minibatches > 1:
        yield f"minibatches is {config.minibatches}, and d3po's pairs belong together in one update: use minibatches 1"
    if rollout.pick == "random" and rollout.fraction < 1:
        yield "rollout.fraction is below 1, and d3po compares both samples at the same steps: use fraction 1, or pick first"
    if config.kl.coef > 0:
        yield (
            f"kl.coef is {config.kl.coef:g}, and d3po has the reference in its loss already: use kl.coef 0, or another "
            "objective.beta"
        )


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
        trains_on="steps", compares_with=("ref",), rewards="order", skips_zero=True, mean_over_kept=True,
        takes_implementation=True, gathers=True, refuses=_refuses,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), eps=(1e-12, 1 - 1e-6))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best sample of each group, -1 for the worst, else 0; groups with equal rewards have none."""
        found = best_and_worst(reward, group)
        out = torch.zeros_like(reward)
        out[found.win[found.valid]] = 1.0
        out[found.lose[found.valid]] = -1.0
        return out

    def statistic(self, v: Tensor, items: Items) -> Tensor:
        """Return the clipped log-ratio of each step to the reference's."""
        return self._log_ratio(v, items, items.transition, LossConfig())

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the clipped log-ratio of the other sample of each pair, `[B, S]`, 0 without a pair."""
        pairs = (group[:, None] == group) & (target_weight[:, None] * target_weight == -1)
        return pairs.to(statistic.dtype) @ statistic

    def loss(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        own, other = self._log_ratio(v, items, transition, config), given(items.context)
        preferred = items.target_weight
        loss = d3po_loss(own, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (own - other)).detach()
        edge = (own.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * own.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def _log_ratio(self, v: Tensor, items: Items, transition: Transition | None, config: LossConfig) -> Tensor:
        step = recorded_step(items, transition)
        log_prob, reference = (
            step_log_prob(
                step.transition, items.x, of, step.x_next, form=config.form, reduction=config.reduction,
                implementation=config.implementation,
            )[0]
            for of in (v, given(items.v_ref))
        )  # fmt: skip
        return clipped_log_ratio(log_prob, reference, eps=self.eps)
