"""KL terms, further loss terms and diagnostics that methods share."""

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

Weighting = Literal["none", "std_over_b"]  # weight of a recorded step's surrogate


@dataclass(frozen=True)
class KLConfig:
    """KL terms of a method on noised samples, mean |v - v_ref|^2, that keep the policy near where training starts.

    Args:
        coef: Weight of the KL term in the loss; 0 skips the term and the reference's forward passes.
        ema_coef: Weight of a second KL term, to a moving average of the policy, which becomes d average + (1 - d) policy
            after each rollout (AWM, arXiv 2509.25050). With coef 0 it is the only reference. It needs LoRA.
        ema_cap: Largest decay d of that average: d is min(ema_cap, ema_rise n) after n updates.
        ema_rise: Growth of d per update.
        guidance: Guidance scale of the reference; None uses the update's (CRD's reference has guidance, its policy none).
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
        """Return the decay d of the moving average after a number of rollouts and updates."""
        return min(self.ema_cap, self.ema_rise * updates)

    def networks(self) -> Networks:
        """Declare the networks of the terms: the reference, and a moving average of the policy."""
        reference: Networks = {"ref": Start(self.guidance)} if self.coef > 0 else {}
        return reference | ({"ema": Follower(self.ema_decay)} if self.ema_coef > 0 else {})

    def add_to(self, loss: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return a loss with the KL terms added, and mean |v - v_ref|^2 without gradient (0 without a reference)."""
        distance = torch.zeros_like(loss)
        if "ref" in rows.predictions:
            distance = velocity_error(v, rows.predictions["ref"])
            loss = loss + self.coef * distance
        return self.add_ema(loss, v, rows), distance.detach()

    def add_ema(self, loss: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Return a loss with the KL to the policy's moving average added, if there is one."""
        v_ema = rows.predictions.get("ema")
        return loss if v_ema is None else loss + self.ema_coef * velocity_error(v, v_ema)


@dataclass(frozen=True)
class StepKLConfig(KLConfig):
    """KL terms of a method on recorded steps that keep the policy near its reference, where training starts.

    Args:
        weight: Weight of a step's KL: exact (KL of the two Gaussian steps, as in the code of Flow-CPS, DanceGRPO and DDPO),
            rate (times |dt|, as in Flow-GRPO's code, whose std is a rate), auto (rate for flow_sde, exact for the other
            samplers), or mse (squared distance of the means of the two steps, without the division by 2 std^2, as in
            Flow-CPS's code for SD3).
        guidance: Guidance scale of the reference; None uses the update's.
    """

    weight: Literal["auto", "rate", "exact", "mse"] = "auto"

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        yield from super().unused()
        if not self.networks():
            yield "weight", "with `kl.coef` 0"

    def weight_of(self, sampler: SamplerRule) -> KLWeight:
        """Return the weight of the KL for a sampler's steps."""
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
        """Return a loss of recorded steps with the KL terms added, and its diagnostics with the KL to the reference.

        Args:
            kl: KL of each step to the reference's step, `[P]`.
        """
        if kl is not None:
            loss = loss + self.weigh(kl, self.coef, v, rows.predictions["ref"], rows, sampler, reduction)
            info = info._replace(kl_ref=kl.detach())
        return self.add_ema_of_steps(loss, v, rows, sampler, reduction), info

    def add_ema_of_steps(
        self, loss: Tensor, v: Tensor, rows: RecordedSteps, sampler: SamplerRule, reduction: Reduction
    ) -> Tensor:
        """Return a loss of recorded steps with the KL to the policy's moving average added, if there is one."""
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
        """Return the KL of each step to another prediction's step, times coef and the step's weight, `[P]`."""
        factor = kl_factor(rows.transition, rows.dt, self.weight_of(sampler))
        return weigh_kl(kl, coef, factor, rows.transition, v, other, reduction)


@dataclass(frozen=True)
class RewardTermConfig:
    """A differentiable reward of the student's clean samples, beside the matching loss (DMDR, arXiv 2511.13649).

        coef relu(margin - R(x0)), or -coef R(x0) without a margin

    Args:
        coef: Weight of the term; with 0 no reward is needed.
        margin: Reward above which there is no gradient; None sets no limit.
        after: Number of updates of the student before the term starts.
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
        """Return the term as a function of rows of items and their clean samples, with a value per row, `[P]`."""
        if not self.coef or run.clock < self.after:
            return lambda rows, x0: 0.0

        def shortfall(rows: Any, x0: Tensor) -> Tensor:
            (score,) = run.compute_rewards(items, rows, x0)
            return self.coef * (-score if self.margin is None else (self.margin - score).relu())

        return shortfall


@dataclass(frozen=True)
class NoGan:
    """No adversarial term, head or images."""

    kind: ClassVar[str] = "none"

    def read_images(self, run: "Run", batch: "Batch", key: Key) -> dict[str, Tensor]:
        """Return no images."""
        return {}

    def differentiate_head(self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str) -> "Items":
        """Return the items unchanged."""
        return items

    def get_term(self, rows: Any, x0: Tensor) -> Tensor | float:
        """Return 0."""
        return 0.0

    def add_term(
        self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str, loss: Loss
    ) -> tuple["Items", Loss]:
        """Return noised samples, and the network's loss."""
        return noise(x0), loss


class CriticInfo(NamedTuple):
    """Diagnostics of a network with a head, one number per item, without gradient."""

    error: Tensor  # mean squared error before the item's weight
    generated: Tensor  # the head's probability that a generated sample is real
    real: Tensor  # the head's probability that an image of the dataset is real


@dataclass(frozen=True)
class HeadGan:
    """A head on the fake's middle block tells noised samples from noised images, and the student fools it (DMD2).

        student    + weight softplus(-D(x_t))
        fake       + critic_weight (softplus(D(x_t)) + softplus(-D(y_t)))

    x_t is a noised sample of the student, y_t a noised image of its prompt, with the same noise at the same level (in DMD2's
    code each has its own), and D the head's output. The head is trained with the fake, and its loss trains all of the fake.

    Args:
        weight: Weight of the student's term: 5e-3 in DMD2's code for SDXL, 1e-3 for SD1.5.
        critic_weight: Weight of the fake's term, 1e-2 in that code.
    """

    kind: ClassVar[str] = "head"
    weight: float = 5e-3
    critic_weight: float = 1e-2

    def __post_init__(self) -> None:
        check_fields(self, "gan", weight=(0, 1e6), critic_weight=(0, 1e6))

    def read_images(self, run: "Run", batch: "Batch", key: Key) -> dict[str, Tensor]:
        """Return an image of each sample's prompt, `[slots, *event]`."""
        return {"image": run.read_images(batch, key)}

    def differentiate_head(self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str) -> "Items":
        """Return the items with the student's loss by the head, and its gradient with respect to the clean samples."""
        noisy = noise(x0)
        loss, slope = run.differentiate(noisy, network, lambda v, rows: generator_loss(rows.predictions["head"]))
        return items.with_predictions(head_loss=loss, head_gradient=slope * (1 - per_sample(noisy.rows.level, slope)))

    def get_term(self, rows: Any, x0: Tensor) -> Tensor | float:
        """Return the student's term, `[P]`, linearised at the clean samples of `differentiate_head`."""
        p = rows.predictions
        return self.weight * (p["head_loss"] + (p["head_gradient"] * (x0 - x0.detach())).flatten(1).sum(1))

    def add_term(
        self, run: "Run", items: "Items", x0: Tensor, noise: "Noise", network: str, loss: Loss
    ) -> tuple["Items", Loss]:
        """Return noised samples with noised images, and the network's loss with the fake's term."""
        noisy = noise(x0).with_predictions(image=noise(items.rows.predictions["image"]).rows.x)

        def critic_loss(v: Tensor, rows: Any) -> tuple[Tensor, CriticInfo]:
            generated = rows.predictions["head"]
            real = run.predict_head(noisy, rows._replace(x=rows.predictions["image"]), network)
            error, info = loss(v, rows)
            diagnostics = CriticInfo(info.error, generated.detach().sigmoid(), real.detach().sigmoid())
            return error + self.critic_weight * discriminator_loss(generated, real), diagnostics

        return noisy, critic_loss


Noise = Callable[[Tensor], "Items"]  # clean samples -> noised items
Gan = NoGan | HeadGan


class ErrorInfo(NamedTuple):
    """Diagnostics of a method that fits a prediction, one number per item, without gradient."""

    error: Tensor  # mean squared error or KL, before the item's weight
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


def correct(run: "Run", steps: "Items", config: Correction, log_prob: Callable[[Tensor, RecordedSteps], Tensor]) -> "Items":
    """Return recorded steps with recomputed old log-probs, and signals weighted by their ratio to the rollout's.

    Without a correction the steps are unchanged. The weight applies to the policy gradient, whose loss is linear in the
    advantage, and not to KL terms.
    """
    if isinstance(config, NoCorrection):
        return steps
    with_velocity = "old" in steps.rows.predictions
    log_prob_now, *velocity = run.measure(
        steps, lambda v, rows: (log_prob(v, rows), v) if with_velocity else (log_prob(v, rows),)
    )
    if velocity:
        steps = steps.with_predictions(old=velocity[0])
    # Gathered, so that all ranks log the same diagnostics.
    computed, recorded = (run.gather(steps, values) for values in (log_prob_now, steps.rows.log_prob_old))
    factor, info = rollout_weights(computed, recorded, mode=config.kind, threshold=config.threshold, level=config.level)
    run.log(correction=info)
    return steps.with_rows(log_prob_old=log_prob_now, signal=steps.rows.signal * steps.look_up(factor))


def weigh(run: "Run", steps: "Items", weighting: Weighting) -> "Items":
    """Return recorded steps with their signals multiplied by weights whose mean over the steps is 1."""
    if weighting == "none":
        return steps
    scale = step_scale(steps.rows.transition)
    mean = run.mean(steps, scale)  # 0 if no step is used, e.g. if all groups are flat
    return steps.with_rows(signal=steps.rows.signal * scale / torch.where(mean > 0, mean, 1))


def fit_prediction(error: Tensor, v: Tensor, rows: Rows, kl: KLConfig) -> tuple[Tensor, ErrorInfo]:
    """Return the loss that fits a prediction, error + kl.coef mean |v - v_ref|^2, and its diagnostics."""
    loss, distance = kl.add_to(error, v, rows)
    return loss, ErrorInfo(error.detach(), distance)
