"""Policy gradients with a ratio of the log-probabilities of recorded steps: PPO's and GRPO's clip, and its successors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.correction import rollout_weights
from fluvial.core.policy import PolicyInfo, dppo_surrogate, guard_surrogate, noise_weighted_surrogate
from fluvial.core.random import Key
from fluvial.engines.engine.engine import UpdateInfo
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import LossConfig, add_ema_kl, log_prob_and_kl, surrogate_and_kl
from fluvial.engines.methods.protocol import Method, ObjectiveTraits
from fluvial.engines.run.batch import Batch, Items, Record
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.items import RecordedSteps
from fluvial.kernels import policy_loss

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

SURROGATE = ObjectiveTraits(trains_on="steps", has_ratio=True, takes_kl=True, takes_implementation=True)


def _needs_density(config: "TrainConfig", *, name: str, mean: bool = True) -> Iterator[UsageError]:
    """Yield what keeps recorded log-probabilities from being (mean) log-densities."""
    rollout = config.rollout
    if rollout.form == "unscaled":
        yield UsageError("rollout.form", "unscaled", "density or no_const", f"{name} takes a log-density")
    if mean and rollout.reduction != "mean":
        yield UsageError("rollout.reduction", rollout.reduction, "mean", f"{name} takes nats per dimension")


def _guard_needs(config: "TrainConfig") -> Iterator[UsageError]:
    sampler = config.rollout.sampler
    if not sampler.rule.std_is_a_rate and not sampler.is_deterministic:
        expected = "flow_sde or dance_sde, whose std is a rate times sqrt(|dt|), with guard"
        yield UsageError("rollout.sampler", sampler.kind, expected)
    yield from _needs_density(config, name="guard")


class PolicyGradient(Method):
    """The program of GRPO and its successors, which differ in `loss`, and in what they record."""

    record = Record()
    splits_guidance = False  # whether the loss combines the halves of guidance itself

    def learn(self, run: Run, batch: Batch, key: Key) -> Iterator[UpdateInfo]:
        """Climb the surrogate of every recorded step, weighted by the advantage of its sample."""
        grades = run.grade(batch)
        steps = run.record_steps(batch, key, grades.advantage, keep=grades.keep, skip_zero=not run.has("ref", "ema"))
        steps = correct(run, steps)
        for part in run.minibatches(steps, key):
            part = run.predict(part, "ref", "ema")
            yield run.update(part, self.loss, split_guidance=self.splits_guidance and not run.has("ema"))


def correct(run: Run, steps: Items) -> Items:
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


@dataclass(frozen=True)
class TempFlow(PolicyGradient):
    """TempFlow-GRPO's surrogate: each step's clipped surrogate times the step's noise (arXiv 2508.04324).

    Its rollouts branch: the samples of a group start from the same noise (rollout.shared_noise) and differ in the noise of a
    single step (rollout.window 1).

    Args:
        clip_low: Lower half-width of the clip: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: Upper half-width of the clip.
        scale: Factor of all weights.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    scale: float = 1.73
    traits = replace(SURROGATE, refuses=partial(_needs_density, name="tempflow", mean=False))

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip_low=(0, 1), clip_high=(0, math.inf), scale=(1e-12, math.inf))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.noise_weighted_surrogate` of the recorded steps."""
        numbers = {"clip_low": self.clip_low, "clip_high": self.clip_high, "scale": self.scale}
        return surrogate_and_kl(v, items, config, noise_weighted_surrogate, items.transition.std, **numbers)


@dataclass(frozen=True)
class Dppo(PolicyGradient):
    """The surrogate of Flow-DPPO: steps whose exact KL is above a threshold are held back (arXiv 2606.11025).

    Args:
        kl_threshold: KL between the old and the current step, in nats per dimension, from which a pair that moves away from
            the old policy adds no gradient.
    """

    kl_threshold: float = 1e-5
    traits = replace(SURROGATE, refuses=partial(_needs_density, name="dppo"))
    record = Record(velocity=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", kl_threshold=(0, math.inf))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.dppo_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"]
        return surrogate_and_kl(v, items, config, dppo_surrogate, *steps, kl_threshold=self.kl_threshold)


@dataclass(frozen=True)
class Guard(PolicyGradient):
    """GRPO-Guard's surrogate: a centred ratio, scaled so that every step's gradient has the same size (arXiv 2510.22319).

    Args:
        clip: Half-width of the clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    traits = replace(SURROGATE, refuses=_guard_needs)
    record = Record(velocity=True)

    def __post_init__(self) -> None:
        check_fields(self, "objective", clip=(0, 1))

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """Return `policy.guard_surrogate` of the recorded steps."""
        steps = items.transition, v, items.predictions["old"], items.dt
        return surrogate_and_kl(v, items, config, guard_surrogate, *steps, clip=self.clip)
