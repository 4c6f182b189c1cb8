"""D3PO: a preference between the best and the worst sample of a group, step by step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.dpo import D3poInfo, best_and_worst, clip_log_ratio, d3po_loss
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.dpo import _dpo_needs
from fluvial.engines.methods.losses import KLConfig, LossConfig, log_prob_and_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Networks, Record, Start
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch
    from fluvial.engines.run.run import Run


def _d3po_needs(config: Any) -> Iterator[UsageError]:
    rollout = config.rollout
    if rollout.sampler.is_deterministic:
        expected = "ddim or flow_sde, whose steps have the log-probability that d3po needs"
        yield UsageError("rollout.sampler", rollout.sampler.kind, expected)
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "d3po's pairs belong together in one update")
    if rollout.trained.kind == "random":
        yield UsageError("rollout.trained", "random", "all or first", "d3po compares both samples at the same steps")
    yield from _dpo_needs(config, name="d3po")


@dataclass(frozen=True)
class D3po(Method):
    """D3PO's loss: a preference between the best and the worst sample of a group, step by step (arXiv 2311.13231).

        -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))),  rho = p(x_next | x) / p_ref(x_next | x)

    Args:
        beta: Inverse temperature of the preference, without a unit.
        eps: Half-width of the clip of the ratio to the reference, which is per dimension.
    """

    beta: float = 0.1
    eps: float = 0.1
    traits = ObjectiveTraits(trains_on="steps", rewards="order", takes_implementation=True, refuses=_d3po_needs)
    record = Record()

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), eps=(1e-12, 1 - 1e-6))

    def networks(self, kl: KLConfig) -> Networks:
        """Keep the policy that training starts from: ratios are relative to it."""
        return {"ref": Start(kl.guidance)}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Compare each step of the best sample of a group with the same step of its worst."""
        preferred = self.prefer(run.grade(batch).reward, batch.group)
        steps = run.record_steps(batch, key, preferred, keep=(preferred != 0).to(preferred.dtype))
        side, group = batch.spread(preferred), torch.arange(batch.share.batch) // batch.compared
        partner = (group[:, None] == group) & (side[:, None] * side == -1)  # [B, B]
        for part in run.minibatches(steps, key):
            part = run.predict(part, "ref")
            ratios = run.gather(part, run.measure(part, partial(self._log_ratio, config=LossConfig())))
            part = part.with_rows(context=part.look_up(to_device(partner.to(ratios.dtype), ratios.device) @ ratios))
            yield run.update(part, self.loss)

    def prefer(self, reward: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best sample of each group, -1 for the worst, else 0; groups with equal rewards have none."""
        chosen, preferred = best_and_worst(reward, group), torch.zeros_like(reward)
        preferred[chosen.win[chosen.valid]], preferred[chosen.lose[chosen.valid]] = 1.0, -1.0
        return preferred

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        own, other, preferred = self._log_ratio(v, items, config), items.context, items.signal
        assert other is not None
        loss = d3po_loss(own, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (own - other)).detach()
        edge = (own.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * own.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def _log_ratio(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> Tensor:
        both = v, items.predictions["ref"]
        log_prob, reference = (log_prob_and_kl(each, items, config, v_ref=None)[0] for each in both)
        return clip_log_ratio(log_prob, reference, eps=self.eps)
