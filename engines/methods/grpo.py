"""Flow-GRPO: a policy gradient with a clipped ratio of the log-probabilities of recorded steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.correction import rollout_weights
from fluvial.core.policy import PolicyInfo
from fluvial.core.random import Key
from fluvial.engines.methods.losses import LossConfig, add_ema_kl, log_prob_and_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.declared import Record
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.kernels import policy_loss

if TYPE_CHECKING:
    from fluvial.engines.engine.engine import UpdateInfo
    from fluvial.engines.run.batch import Batch, Items
    from fluvial.engines.run.run import Run


SURROGATE = ObjectiveTraits(trains_on="steps", has_ratio=True, takes_kl=True, takes_implementation=True)


class PolicyGradient(Method):
    """The program of GRPO and its successors, which differ in `loss`, and in what they record."""

    record = Record()
    splits_guidance = False  # whether the loss combines the halves of guidance itself

    def learn(self, run: "Run", batch: "Batch", key: Key) -> "Iterator[UpdateInfo]":
        """Climb the surrogate of every recorded step, weighted by the advantage of its sample."""
        grades = run.grade(batch)
        steps = run.record_steps(batch, key, grades.advantage, keep=grades.keep, skip_zero=not run.has("ref", "ema"))
        steps = correct(run, steps)
        for part in run.minibatches(steps, key):
            part = run.predict(part, "ref", "ema")
            yield run.update(part, self.loss, split_guidance=self.splits_guidance and not run.has("ema"))


def correct(run: "Run", steps: "Items") -> "Items":
    """Return recorded steps with the update's own old log-probs, and signals weighted by their ratio to the rollout's.

    Nothing changes without a correction. The weight is that of the policy gradient, whose loss is linear in the advantage; a
    KL term has no weight.
    """
    config, keeps_velocity = run.config.correction, "old" in steps.rows.predictions
    if config.mode == "none":
        return steps

    def score(v: Tensor, rows: RecordedSteps) -> tuple[Tensor, ...]:
        log_prob, _ = log_prob_and_kl(v, rows, run.loss_settings, v_ref=None)
        return (log_prob, v) if keeps_velocity else (log_prob,)

    log_prob, *velocity = run.measure(steps, score)
    if velocity:
        steps = steps.with_predictions(old=velocity[0])
    # Of all ranks, so that each has the same diagnostics.
    computed, known = (run.gather(steps, values) for values in (log_prob, steps.rows.log_prob_old))
    factor, info = rollout_weights(computed, known, mode=config.mode, threshold=config.threshold, level=config.level)
    run.log(correction=info)
    return steps.with_rows(log_prob_old=log_prob, signal=steps.rows.signal * steps.look_up(factor))


@dataclass(frozen=True)
class Clipped(PolicyGradient):
    """The clipped surrogate of PPO and GRPO on recorded steps (arXiv 1707.06347, 2402.03300, 2505.05470).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high]. The ratio is per
            dimension if rollout.reduction is mean.
        clip_high: Upper half-width of the clip.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    traits = SURROGATE
    splits_guidance = True

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `kernels.policy_loss` of the recorded steps."""
        loss, info = policy_loss(
            items.transition,
            items.x,
            v,
            items.x_next,
            log_prob_old=items.log_prob_old,
            advantage=items.signal,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            v_ref=items.predictions.get("ref"),
            kl_coef=config.kl_coef,
            kl_weight=config.kl_weight,
            dt=items.dt,
            v_uncond=items.predictions.get("uncond"),
            guidance=items.guidance,
            form=config.form,
            reduction=config.reduction,
            implementation=config.implementation,
        )
        return add_ema_kl(loss, v, items, config), info
