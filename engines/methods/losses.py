"""KL terms, further terms and diagnostics that the losses of methods share."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.adversarial import discriminator_loss, generator_loss
from fluvial.core.checks import check_fields, per_sample
from fluvial.core.correction import rollout_weights
from fluvial.core.gaussian import Reduction
from fluvial.core.policy import PolicyInfo, step_scale
from fluvial.core.random import Key
from fluvial.core.step import KLWeight, kl_factor, weigh_kl
from fluvial.core.types import Scalar
from fluvial.engines.choices import refuse_unused
from fluvial.engines.run.declared import Follower, Loss, Networks, Start
from fluvial.engines.sampling.config import Correction, NoCorrection
from fluvial.engines.sampling.items import RecordedSteps, Rows
from fluvial.engines.sampling.samplers import SamplerRule
from fluvial.kernels import velocity_error

if TYPE_CHECKING:
    from fluvial.engines.run.run import Run
    from fluvial.engines.sampling.batch import Batch, Items

Weighting = Literal["none", "std_over_b"]  # of the surrogate of a recorded step


@dataclass(frozen=True)
class KLConfig:
    """KL terms of a method on noised samples, mean |v - v_ref|^2, that keep the policy near where training starts from.

    Args:
        coef: Weight of the KL term in the loss; 0 leaves the term and the reference's forward passes out.
        ema_coef: Weight of a second KL term, to a moving average of the policy, which becomes d average + (1 - d) policy
            after each rollout (AWM, arXiv 2509.25050). With coef 0 it is the only reference. It needs LoRA.
        ema_cap: Largest decay d of that average: d is min(ema_cap, ema_rise n) after n updates.
        ema_rise: Growth of d per update.
        guidance: Scale of classifier-free guidance of the reference's prediction; None is that of the update's (CRD's
            reference has guidance, and its policy none).
    """

    coef: float = 0.0
    guidance: float | None = None
    ema_coef: float = 0.0
    ema_cap: float = 0.3
    ema_rise: float = 0.001

    def __post_init__(self) -> None:
        any_size = (0, 1e6)
        check_fields(self, "kl", coef=any_size, ema_coef=any_size, ema_cap=(0, 0.999999), ema_rise=(0, 1), guidance=any_size)
        refuse_unused(self, "kl.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        for name in () if self.ema_coef else ("ema_cap", "ema_rise"):
            yield name, "with `kl.ema_coef` 0"
        if not self.coef:
            yield "guidance", "with `kl.coef` 0, without a reference"

    def ema_decay(self, rollouts: int, updates: int) -> float:
        """Return the share d of the moving average that stays after a number of rollouts and updates."""
        return min(self.ema_cap, self.ema_rise * updates)

    def networks(self) -> Networks:
        """Return the networks that the terms compare with: the reference, and a moving average of the policy."""
        reference: Networks = {"ref": Start(self.guidance)} if self.coef > 0 else {}
        return reference | ({"ema": Follower(self.ema_decay)} if self.ema_coef > 0 else {})

    def add_to(self, loss: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return a loss with the terms added, and mean |v - v_ref|^2 without gradient, 0 without a reference."""
        distance = torch.zeros_like(loss)
        if "ref" in rows.predictions:
            distance = velocity_error(v, rows.predictions["ref"])
            loss = loss + self.coef * distance
        return self.add_ema(loss, v, rows), distance.detach()

    def add_ema(self, loss: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Return a loss with the term to the moving average of the policy added, if there is one."""
        v_ema = rows.predictions.get("ema")
        return loss if v_ema is None else loss + self.ema_coef * velocity_error(v, v_ema)


@dataclass(frozen=True)
class StepKLConfig(KLConfig):
    """KL terms of a method on recorded steps that keep the policy near its reference, where training starts.

    Args:
        weight: Weight of the KL of a step: exact (the KL of the two Gaussian steps, as the code of Flow-CPS, DanceGRPO and
            DDPO has it), rate (times |dt|, as Flow-GRPO's code has it, whose std is a rate) or auto (rate for flow_sde,
            exact for the other samplers), or mse (the squared distance of the means of the two steps, without the division
            by 2 std^2, as in Flow-CPS's code for SD3).
        guidance: Scale of classifier-free guidance of the reference's prediction; None is that of the update's.
    """

    weight: Literal["auto", "rate", "exact", "mse"] = "auto"

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        yield from super().unused()
        if not self.networks():
            yield "weight", "with `kl.coef` 0"

    def weight_of(self, sampler: SamplerRule) -> KLWeight:
        """Return the weight of the KL of a sampler's steps."""
        return sampler.kl_weight if self.weight == "auto" else self.weight

    def add_to_steps(
        self,
        loss: Tensor,
        info: PolicyInfo,
        kl: Tensor | None,
        v: Tensor,
        rows: RecordedSteps,
        sampler: SamplerRule,
        reduction: Reduction,
    ) -> tuple[Tensor, PolicyInfo]:
        """Return a loss of recorded steps with the terms added, and its diagnostics with the KL to the reference.

        Args:
            kl: KL of each step to the reference's, `[P]`.
        """
        if kl is not None:
            loss = loss + self.weigh(kl, self.coef, v, rows.predictions["ref"], rows, sampler, reduction)
            info = info._replace(kl_ref=kl.detach())
        return self.add_ema_of_steps(loss, v, rows, sampler, reduction), info

    def add_ema_of_steps(
        self, loss: Tensor, v: Tensor, rows: RecordedSteps, sampler: SamplerRule, reduction: Reduction
    ) -> Tensor:
        """Return a loss with the KL of each step to that of the policy's moving average added, if there is one."""
        v_ema = rows.predictions.get("ema")
        if v_ema is None:
            return loss
        kl = gaussian.kl(rows.transition, v, v_ema, reduction=reduction)
        return loss + self.weigh(kl, self.ema_coef, v, v_ema, rows, sampler, reduction)

    def weigh(
        self,
        kl: Tensor,
        coef: Scalar,
        v: Tensor,
        other: Tensor,
        rows: RecordedSteps,
        sampler: SamplerRule,
        reduction: Reduction,
    ) -> Tensor:
        """Return the KL of each step to another prediction's, times coef and its weight, `[P]`."""
        factor = kl_factor(rows.transition, rows.dt, self.weight_of(sampler))
        return weigh_kl(kl, coef, factor, rows.transition, v, other, reduction)


@dataclass(frozen=True)
class RewardTermConfig:
    """A differentiable reward of the student's clean samples, beside the matching loss (DMDR, arXiv 2511.13649).

        coef relu(margin - R(x0)), or -coef R(x0) without a margin

    Args:
        coef: Weight of the term; 0 leaves it out, and needs no reward.
        margin: Reward at which the gradient ends; None follows it without end.
        after: Number of updates of the student before it begins.
    """

    coef: float = 0.0
    margin: float | None = None
    after: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "reward_term", coef=(0, math.inf), margin=(-math.inf, math.inf), after=(0, 2**31))
        refuse_unused(self, "reward_term.")

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        for name in () if self.coef else ("margin", "after"):
            yield name, "with `reward_term.coef` 0"

    def bind(self, run: "Run", items: "Items") -> Callable[[Any, Tensor], Tensor | float]:
        """Return the term as a function of rows of items and their clean samples, `[P]`."""
        if not self.coef or run.clock < self.after:
            return lambda rows, x0: 0.0

        def lack(rows: Any, x0: Tensor) -> Tensor:
            (score,) = run.rewards_of(items, rows, x0)
            return self.coef * (-score if self.margin is None else (self.margin - score).relu())

        return lack


@dataclass(frozen=True)
class NoGan:
    """No adversarial term: no head, and no images."""

    kind: ClassVar[str] = "none"

    def read(self, run: "Run", batch: "Batch", key: Key) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def oppose(self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str) -> "Items":
        """Return the items as they are."""
        return items

    def fool(self, rows: Any, x0: Tensor) -> Tensor | float:
        """Return 0."""
        return 0.0

    def judge(
        self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str, loss: Loss
    ) -> tuple["Items", Loss]:
        """Return noised samples, and the loss of the network."""
        return noise(x0), loss


class CriticInfo(NamedTuple):
    """Diagnostics of a network with a head, one number per item, without gradient."""

    error: Tensor  # mean squared error before the item's weight
    generated: Tensor  # probability of being real, of a generated sample, by the head
    real: Tensor  # that of a given image


@dataclass(frozen=True)
class HeadGan:
    """A head on the fake's middle block tells noised samples from noised images, which the student is to prevent (DMD2).

        student    + weight softplus(-D(x_t))
        fake       + critic_weight (softplus(D(x_t)) + softplus(-D(y_t)))

    x_t is a noised sample of the student, y_t a noised image of its prompt, with the same noise at the same level (in DMD2's
    code each has its own), and D what the head says. The head learns with the fake, whose other weights this loss moves.

    Args:
        weight: Weight of the student's term. 5e-3 is that of DMD2's code for SDXL (1e-3 for SD1.5).
        critic_weight: Weight of the fake's term, 1e-2 in that code.
    """

    kind: ClassVar[str] = "head"
    weight: float = 5e-3
    critic_weight: float = 1e-2

    def __post_init__(self) -> None:
        check_fields(self, "gan", weight=(0, 1e6), critic_weight=(0, 1e6))

    def read(self, run: "Run", batch: "Batch", key: Key) -> dict[str, Tensor]:
        """Return an image of the prompt of each sample, `[slots, *event]`."""
        return {"image": run.read_images(batch, key)}

    def oppose(self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str) -> "Items":
        """Return the items with the loss of noised clean samples by the head, and its gradient with respect to these."""
        noisy = noise(x0)
        loss, slope = run.differentiate(noisy, network, lambda v, rows: generator_loss(rows.predictions["head"]))
        return items.with_predictions(fooling=loss, slope=slope * (1 - per_sample(noisy.rows.level, slope)))

    def fool(self, rows: Any, x0: Tensor) -> Tensor | float:
        """Return the student's term, `[P]`: its value at the clean samples of `oppose`, with its gradient there."""
        p = rows.predictions
        return self.weight * (p["fooling"] + (p["slope"] * (x0 - x0.detach())).flatten(1).sum(1))

    def judge(
        self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str, loss: Loss
    ) -> tuple["Items", Loss]:
        """Return noised samples with noised images, and the loss of the network with the fake's term."""
        noisy = noise(x0).with_predictions(image=noise(items.rows.predictions["image"]).rows.x)

        def add_term(v: Tensor, rows: Any) -> tuple[Tensor, CriticInfo]:
            generated = rows.predictions["head"]
            real = run.judge(noisy, rows._replace(x=rows.predictions["image"]), network)
            error, info = loss(v, rows)
            told = CriticInfo(info.error, generated.detach().sigmoid(), real.detach().sigmoid())
            return error + self.critic_weight * discriminator_loss(generated, real), told

        return noisy, add_term


Noise = Callable[[Tensor], "Items"]  # of clean samples
Gan = NoGan | HeadGan


class ErrorInfo(NamedTuple):
    """Diagnostics of an objective that fits a prediction, one number per item, without gradient."""

    error: Tensor  # mean squared error or KL that is fitted, before the item's weight
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


def correct(run: "Run", steps: "Items", config: Correction, log_prob: Callable[[Tensor, RecordedSteps], Tensor]) -> "Items":
    """Return recorded steps with the update's own old log-probs, and signals weighted by their ratio to the rollout's.

    Nothing changes without a correction. The weight is that of the policy gradient, whose loss is linear in the advantage; a
    KL term has no weight.
    """
    if isinstance(config, NoCorrection):
        return steps
    with_velocity = "old" in steps.rows.predictions
    log_prob_now, *velocity = run.measure(
        steps, lambda v, rows: (log_prob(v, rows), v) if with_velocity else (log_prob(v, rows),)
    )
    if velocity:
        steps = steps.with_predictions(old=velocity[0])
    # Of all ranks, so that each has the same diagnostics.
    computed, known = (run.gather(steps, values) for values in (log_prob_now, steps.rows.log_prob_old))
    factor, info = rollout_weights(computed, known, mode=config.kind, threshold=config.threshold, level=config.level)
    run.log(correction=info)
    return steps.with_rows(log_prob_old=log_prob_now, signal=steps.rows.signal * steps.look_up(factor))


def weigh(run: "Run", steps: "Items", weighting: Weighting) -> "Items":
    """Return recorded steps with the weights of a weighting in their signals, whose mean over the steps is 1."""
    if weighting == "none":
        return steps
    scale = step_scale(steps.rows.transition)
    mean = run.mean(steps, scale)  # 0 where no step is used, as of a batch of flat groups
    return steps.with_rows(signal=steps.rows.signal * scale / torch.where(mean > 0, mean, 1))


def fit_prediction(error: Tensor, v: Tensor, rows: Rows, kl: KLConfig) -> tuple[Tensor, ErrorInfo]:
    """Return the loss that fits a prediction, error + kl.coef mean |v - v_ref|^2, and its diagnostics."""
    loss, distance = kl.add_to(error, v, rows)
    return loss, ErrorInfo(error.detach(), distance)
