"""Flow-GRPO: a policy gradient with a clipped ratio of the log-probabilities of recorded steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fluvial.core.gaussian import Form, Reduction
from fluvial.core.policy import PolicyInfo
from fluvial.core.random import Key
from fluvial.engines.methods.losses import StepKLConfig, Weighting, correct, weigh
from fluvial.engines.run.method import Method, Needs, PassesConfig, RecordedRows
from fluvial.engines.sampling.config import Correction, NoCorrection, SamplingConfig
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.engines.sampling.window import AllRecorded, Trained
from fluvial.engines.scoring.advantages import AdvantageConfig, Grades
from fluvial.kernels import policy_loss, step_log_prob

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items


@dataclass(frozen=True)
class PolicyGradient(Method):
    """The training loop shared by GRPO and its successors. They differ in `loss` and in the recorded steps.

    Args:
        correction: Weights for a rollout that another program made.
    """

    sampling: SamplingConfig = SamplingConfig()
    trained: Trained = AllRecorded()
    advantage: AdvantageConfig = AdvantageConfig()
    passes: PassesConfig = PassesConfig()
    kl: StepKLConfig = StepKLConfig()
    correction: Correction = NoCorrection()
    needs: ClassVar[Needs] = Needs(ratio=True)
    # Fixed here, so that methods which cannot vary them have no such flags; Grpo makes them hyper-parameters.
    form: ClassVar[Form] = "density"
    reduction: ClassVar[Reduction] = "mean"
    weighting: ClassVar[Weighting] = "none"
    records_velocity: ClassVar[bool] = False
    splits_guidance: ClassVar[bool] = False  # whether the loss combines the halves of guidance itself

    @property
    def rows(self) -> RecordedRows:
        """Train on recorded steps."""
        return RecordedRows(self.form, self.reduction, self.records_velocity, self.trained)

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Compute the advantages of a collected batch, and take optimizer steps on the surrogate loss."""
        yield from self.optimize(run, batch, key, run.grade(batch, self.advantage))

    def optimize(self, run: "Run", batch: "Batch", key: Key, grades: Grades) -> "Iterator[UpdateInfo]":
        """Take optimizer steps on the loss of the recorded steps, for advantages that are already computed."""
        has_kl = bool(self.networks())  # without a KL, a step with advantage 0 has no gradient and is skipped
        steps = run.record_steps(batch, key, grades.advantage, trained=self.trained, keep=grades.keep, skip_zero=not has_kl)
        steps = correct(run, weigh(run, steps, self.weighting), self.correction, self.log_prob)  # both off by default
        split = self.splits_guidance and not self.kl.ema_coef  # the KL to the moving average takes the guided prediction
        for part in run.minibatches(steps, key, self.passes):
            part = self.couple_steps(run, run.predict(part))
            yield run.update(part, self.loss, split_guidance=split)

    def couple_steps(self, run: "Run", part: "Items") -> "Items":
        """Couple the steps of an update, e.g. by a ratio per chunk (Chunk-GRPO); by default no change."""
        return part

    def log_prob(self, v: Tensor, rows: RecordedSteps) -> Tensor:
        """Return the log-probability of each recorded step under a prediction, `[P]`."""
        return step_log_prob(rows.transition, rows.x, v, rows.x_next, form=self.form, reduction=self.reduction)[0]


@dataclass(frozen=True)
class Grpo(PolicyGradient, name="grpo"):
    """The clipped surrogate of PPO and GRPO on recorded steps (arXiv 1707.06347, 2402.03300, 2505.05470).

    Args:
        clip_low: Lower half-width of the clip of the ratio to [1 - clip_low, 1 + clip_high], in the unit of `reduction`.
        clip_high: Upper half-width of the clip.
        form: Log-probability: density, no_const (no constant) or unscaled (negative squared error).
        reduction: Reduction of the log-probability over pixels: mean (nats per dimension) or sum (nats).
        weighting: Weight of each step's surrogate: none, or std_over_b (Flash-GRPO, see `core.policy.step_scale`).
    """

    bounds: ClassVar = {"clip_low": (0, 1), "clip_high": (0, math.inf)}
    splits_guidance = True
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    form: Form = "density"  # type: ignore[misc]
    reduction: Reduction = "mean"  # type: ignore[misc]
    weighting: Weighting = "none"  # type: ignore[misc]

    def loss(self, v: Tensor, rows: RecordedSteps) -> tuple[Tensor, PolicyInfo]:
        """Return max(-A rho, -A clip(rho)) + w (coef KL(policy || ref) + ema_coef KL(policy || ema)), w by `kl.weight`."""
        # Fused `core.policy.clipped_surrogate` of `gaussian.log_prob`, plus `gaussian.kl`: see `core.step.policy_loss`.
        loss, info = policy_loss(
            rows.transition,
            rows.x,
            v,
            rows.x_next,
            log_prob_old=rows.log_prob_old,
            advantage=rows.signal,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            v_ref=rows.predictions.get("ref"),
            kl_coef=self.kl.coef,
            kl_weight=self.kl.weight_of(self.sampling.sampler.rule),
            dt=rows.dt,
            v_uncond=rows.predictions.get("uncond"),
            guidance=rows.guidance,
            form=self.form,
            reduction=self.reduction,
        )
        return self.kl.add_ema_of_steps(loss, v, rows, self.sampling.sampler.rule, self.reduction), info
