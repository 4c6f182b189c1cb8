"""Adjoint Matching: fits each step's control to a reward's gradient, propagated back through the base."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core.adjoint import adjoint_loss, lean_adjoint
from fluvial.core.random import Key
from fluvial.core.transitions import Transition
from fluvial.engines.errors import UsageError
from fluvial.engines.run.declared import Networks, Start
from fluvial.engines.run.method import Method, Needs, PassesConfig, RecordedRows
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.samplers import Stochastic
from fluvial.engines.sampling.window import AllRecorded, AllSteps, Trained
from fluvial.models.host_values import to_device

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


class AdjointInfo(NamedTuple):
    """Diagnostics of Adjoint Matching, one number per item, without gradient."""

    control: Tensor  # mean |b (v - v_base) / std|^2, which is 0 for the base
    adjoint: Tensor  # mean |std adj|^2, the target of the control


@dataclass(frozen=True)
class AdjointMatching(Method, name="adjoint"):
    """Adjoint Matching: a policy that samples from p_base exp(scale R), for a differentiable reward R (arXiv 2409.08861).

        loss = sum |b (v - v_base) / std + std adj|^2
        adj_k = a adj_{k+1} + b J_base(x_k)^T adj_{k+1}, adj_T = -scale grad R(x_T)

    The base is the policy that training starts from. Only a memoryless sampler is unbiased: flow_sde with eta sqrt(2), or
    ddim with eta 1. The adjoint is stored in float32; the network propagates it in the dtype of its forward passes.

    Args:
        sampling: How rollouts are sampled. With `guidance.update` conditional, neither adjoint nor control has guidance, as
            in the authors' runs.
        trained: Which recorded steps are trained on; steps without noise are left out.
        scale: Factor lambda of the reward.
        index: Adjoint of a step: next (at its end, which is exact) or current (at its start, as in the authors' code for
            SD 1.5).
        quantile: Quantile q of sqrt(loss) over the items of an update; items at or above its moving average, of decay 0.9,
            have no gradient. None uses all items.
    """

    needs: ClassVar[Needs] = Needs(rewards="gradients", conditional=True)
    bounds: ClassVar = {"scale": (0, math.inf), "quantile": (1e-6, 1)}
    sampling: SamplingConfig = SamplingConfig(sampler=Stochastic(eta=math.sqrt(2)))
    trained: Trained = AllRecorded()
    passes: PassesConfig = PassesConfig()
    scale: float = 100.0
    index: Literal["next", "current"] = "next"
    quantile: float | None = 0.9

    def problems(self) -> Iterator[UsageError]:
        """Yield conflicts between the hyper-parameters."""
        yield from super().problems()
        sampler, window = self.sampling.sampler, self.sampling.window
        if sampler.is_deterministic:
            hint = "the control of a step is relative to its noise"
            yield UsageError("sampling.sampler", sampler.kind, "flow_sde or ddim, whose steps have noise", hint)
        if window != AllSteps():
            yield UsageError("sampling.window", window.kind, "all steps, through which adjoint carries the gradient back")

    @property
    def rows(self) -> RecordedRows:
        """Record every step, including the last one, which may have no noise."""
        return RecordedRows("unscaled", trained=self.trained)

    def networks(self) -> Networks:
        """Declare the base: the control is relative to it."""
        return {"base": Start()}

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Propagate the reward's gradient back through the base, then fit the steps' control to it."""
        keep = run.grade(batch).keep[:, None] * (batch.noise > 0)
        steps = run.record_steps(batch, key, trained=self.trained, keep=keep)
        steps = steps.with_predictions(adjoint=self.carry_back(run, steps, -self.scale * run.differentiate_rewards(batch)))
        for part in run.minibatches(steps, key, self.passes):
            part = run.predict(part, "base")
            if self.quantile is not None:
                sizes = run.gather(part, run.measure(part, lambda v, rows: self.loss(v, rows)[0])).sqrt()
                counted = to_device(torch.nonzero(part.used.flatten()).flatten(), sizes.device)
                largest = sizes.flatten()[counted].quantile(self.quantile).item() if len(counted) else 0.0
                bound = run.average("adjoint", largest, 0.9)
                part = part.with_rows(context=part.look_up((sizes < bound).to(sizes.dtype)))
            yield run.update(part, self.loss)

    def carry_back(self, run: "Run", steps: "Items", adjoint: Tensor) -> Tensor:
        """Return the adjoint of each recorded step, given that of the final samples, `[slots, *event] -> [P, *event]`."""
        adjoints, size = list[Tensor](), len(adjoint)
        for start in reversed(range(0, len(steps.rows.level), size)):
            part = steps.part(slice(start, start + size))
            end, transition = adjoint, Transition(*(coefficient.float() for coefficient in part.rows.transition))
            adjoint = lean_adjoint(transition, adjoint, run.vjp(part, "base", adjoint))
            adjoints.append(end if self.index == "next" else adjoint)
        return torch.cat(adjoints[::-1])

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, AdjointInfo]:
        """Return `core.adjoint.adjoint_loss`, 0 for items above the quantile."""
        base, adjoint, zero = rows.predictions["base"], rows.predictions["adjoint"], torch.zeros_like(v)
        loss = adjoint_loss(rows.transition, v, base, adjoint)
        with torch.no_grad():
            parts = (
                adjoint_loss(rows.transition, *each) / v[0].numel() for each in ((v, base, zero), (zero, zero, adjoint))
            )
            info = AdjointInfo(*parts)
        return (loss if rows.context is None else loss * rows.context), info
