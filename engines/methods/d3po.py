"""D3PO: stepwise preferences between the best and the worst sample of a group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fluvial.core.dpo import D3poInfo, best_and_worst, clip_log_ratio, d3po_loss
from fluvial.core.random import Key
from fluvial.engines.errors import UsageError
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.run.method import EpochsConfig, Method
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.window import AllRecorded, FirstRecorded
from fluvial.kernels import step_log_prob
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch


@dataclass(frozen=True)
class D3po(Method, name="d3po"):
    """D3PO's loss: stepwise preferences between the best and the worst sample of a group (arXiv 2311.13231).

        -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))),  rho = p(x_next | x) / p_ref(x_next | x)

    Args:
        trained: Which recorded steps are trained on, the same for both samples.
        passes: How often a batch is trained on; a pair stays together in one update.
        beta: Inverse temperature of the preference, without a unit.
        eps: Half-width of the clip of the ratio to the reference, which is per dimension.
        ref_guidance: Guidance scale of the reference; None uses the update's.
    """

    bounds: ClassVar = {"beta": (1e-12, math.inf), "eps": (1e-12, 1 - 1e-6), "ref_guidance": (0, math.inf)}
    sampling: SamplingConfig = SamplingConfig()
    trained: AllRecorded | FirstRecorded = AllRecorded()
    passes: EpochsConfig = EpochsConfig()
    beta: float = 0.1
    eps: float = 0.1
    ref_guidance: float | None = None

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        if self.sampling.sampler.is_deterministic:
            expected = "ddim or flow_sde, whose steps have the log-probability that d3po needs"
            yield UsageError("sampling.sampler", self.sampling.sampler.kind, expected)
        yield from super().problems()

    def networks(self) -> Networks:
        """Declare the policy that training starts from: ratios are relative to it."""
        return {"ref": Start(self.ref_guidance)}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Compare each step of a group's best sample with the same step of its worst."""
        yield from self.compare(run, batch, key, self.prefer(run.grade(batch).reward, batch.group))

    def compare(self, run: "Run", batch: "Batch", key: Key, preferred: Tensor) -> "Iterator[UpdateInfo]":
        """Compare each step of a preferred sample with the same step of its group's rejected sample.

        Args:
            preferred: 1 for the preferred sample of a group, -1 for the rejected one, else 0, `[N]`; or per recorded step,
                `[N, S]`.
        """
        chosen = (preferred != 0).to(preferred.dtype)
        steps = run.record_steps(batch, key, preferred, trained=self.trained, keep=chosen)
        side, group = batch.spread(preferred).reshape(batch.share.batch, 1, -1), torch.arange(batch.share.batch)
        same = (group[:, None] // batch.compared == group // batch.compared)[:, :, None]
        partner = same & (side * side.transpose(0, 1) == -1)  # [B, B, 1 or S]
        for part in run.minibatches(steps, key, self.passes):
            part = run.predict(part, "ref")
            ratios = run.gather(part, run.measure(part, self.log_ratio))
            partners = to_device(partner.to(ratios.dtype), ratios.device)
            part = part.with_rows(context=part.look_up((partners * ratios).sum(1)))
            yield run.update(part, self.loss)

    def prefer(self, reward: Tensor, group: Tensor, least: float = 0.0) -> Tensor:
        """Return 1 for a group's best sample, -1 for its worst, else 0; all 0 unless they differ by more than `least`."""
        chosen, preferred = best_and_worst(reward, group), torch.zeros_like(reward)
        valid = chosen.valid & (reward[chosen.win] - reward[chosen.lose] > least)
        preferred[chosen.win[valid]], preferred[chosen.lose[valid]] = 1.0, -1.0
        return preferred

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        ratio, other, preferred = self.log_ratio(v, rows), rows.context, rows.signal
        assert other is not None
        loss = d3po_loss(ratio, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (ratio - other)).detach()
        edge = (ratio.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * ratio.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def log_ratio(self, v: Tensor, rows: RecordedSteps) -> Tensor:
        """Return the clipped log-ratio of each step to the reference, `[P]`."""
        velocities = v, rows.predictions["ref"]
        log_prob, reference = (step_log_prob(rows.transition, rows.x, each, rows.x_next)[0] for each in velocities)
        return clip_log_ratio(log_prob, reference, eps=self.eps)
