"""What the losses of objectives share: the settings of a run's loss, recorded steps, KL terms and diagnostics."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.policy import PolicyInfo
from fluvial.core.step import KLWeight
from fluvial.core.transitions import Transition
from fluvial.engines.rollout.items import Items, given
from fluvial.kernels import Implementation, step_log_prob, velocity_error


@dataclass(frozen=True)
class KLConfig:
    """The KL term that keeps the policy near the reference, which is the policy that training starts from.

    Args:
        coef: Weight of the KL term in the loss; 0 leaves the term and the reference's forward passes out.
        ema_coef: Weight of a second KL term, to a moving average of the policy, which becomes d average + (1 - d) policy
            after each rollout (AWM, arXiv 2509.25050). With coef 0 it is the only reference. It needs LoRA.
        ema_cap: Largest decay d of that average: d is min(ema_cap, ema_rise n) after n updates.
        ema_rise: Growth of d per update.
        weight: Weight of the KL of a recorded step: exact (the KL of the two Gaussian steps, as the code of Flow-CPS,
            DanceGRPO and DDPO has it), rate (times |dt|, as Flow-GRPO's code has it, whose std is a rate) or auto (rate for
            flow_sde, exact for the other samplers), or mse (the squared distance of the means of the two steps, without the
            division by 2 std^2, as in Flow-CPS's code for SD3). For samples with noise on them the term is mean
            |v - v_ref|^2.
        guidance: Scale of classifier-free guidance of the reference's prediction; None is that of the update's (CRD's
            reference has guidance, and its policy none).
    """

    coef: float = 0.0
    weight: Literal["auto", "rate", "exact", "mse"] = "auto"
    guidance: float | None = None
    ema_coef: float = 0.0
    ema_cap: float = 0.3
    ema_rise: float = 0.001

    def __post_init__(self) -> None:
        check_fields(
            self, "kl", coef=(0, math.inf), ema_coef=(0, math.inf), ema_cap=(0, 0.999999), ema_rise=(0, 1),
            guidance=(0, math.inf),
        )  # fmt: skip

    @property
    def is_on(self) -> bool:
        """Whether the loss has a KL term."""
        return self.coef > 0 or self.ema_coef > 0

    def ema_decay(self, rollouts: int, updates: int) -> float:
        """Return the share d of the moving average that stays after a number of rollouts and updates."""
        return min(self.ema_cap, self.ema_rise * updates)

    def weight_of(self, sampler: str) -> KLWeight:
        """Return the weight of the KL of a sampler's steps."""
        if self.weight != "auto":
            return self.weight
        return "rate" if sampler == "flow_sde" else "exact"


class LossConfig(NamedTuple):
    """What every loss of a run is computed with."""

    form: Form = "density"  # form of the log-probabilities
    reduction: Reduction = "mean"  # their reduction over the event
    kl_coef: float = 0.0  # weight of the KL to the reference; v_ref is there if it is above 0
    kl_weight: KLWeight = "rate"
    implementation: Implementation = "auto"  # see `kernels.dispatch.resolve`
    kl_ema_coef: float = 0.0  # weight of the KL to the moving average of the policy; v_ema is there if it is above 0
    reward: Callable[[Tensor, Items], Tensor] | None = None  # (v, items) -> reward [P] with gradient, for such objectives


class ErrorInfo(NamedTuple):
    """Diagnostics of an objective that fits a prediction, one number per item, without gradient."""

    error: Tensor  # mean squared error or KL that is fitted, before the item's weight
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


class Step(NamedTuple):
    """The fields of recorded steps that are always there."""

    x_next: Tensor
    log_prob_old: Tensor
    transition: Transition
    dt: Tensor


def recorded_step(items: Items, transition: Transition | None) -> Step:
    """Return what the rollout recorded of each item's step."""
    assert transition is not None
    return Step(given(items.x_next), given(items.log_prob_old), transition, given(items.level_next) - items.level)


def log_prob_and_kl(v: Tensor, items: Items, step: Step, config: LossConfig) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each recorded step, `[P]`, and its KL to the reference's, None without a reference."""
    return step_log_prob(
        step.transition, items.x, v, step.x_next, v_ref=items.v_ref, form=config.form, reduction=config.reduction,
        implementation=config.implementation,
    )  # fmt: skip


def add_step_kl(
    loss: Tensor, info: PolicyInfo, kl: Tensor | None, step: Step, config: LossConfig
) -> tuple[Tensor, PolicyInfo]:
    """Return a surrogate loss with the KL to the reference's step added, and its diagnostics with that KL."""
    if kl is None:
        return loss, info
    return loss + config.kl_coef * _kl_factor(step, config) * kl, info._replace(kl_ref=kl.detach())


def _kl_factor(step: Step, config: LossConfig) -> Tensor | float:
    """Return the factor of the exact KL of recorded steps in the loss, as in `core.step.policy_loss`."""
    if config.kl_weight == "rate":
        return step.dt.abs()
    return 2 * step.transition.std**2 if config.kl_weight == "mse" else 1.0


def add_velocity_kl(loss: Tensor, v: Tensor, items: Items, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return a loss with kl_coef mean |v - v_ref|^2 added, and that mean without gradient, 0 without a reference."""
    if items.v_ref is None:
        return loss, torch.zeros_like(loss)
    kl = velocity_error(v, items.v_ref, implementation=config.implementation)
    return loss + config.kl_coef * kl, kl.detach()


def add_ema_kl(loss: Tensor, v: Tensor, items: Items, config: LossConfig) -> Tensor:
    """Return a loss with the KL to the moving average of the policy added, if the run has one.

    As the KL to the reference, it is that of the Gaussian steps for recorded steps, else mean |v - v_ema|^2.
    """
    if items.v_ema is None:
        return loss
    if items.x_next is None:
        return loss + config.kl_ema_coef * velocity_error(v, items.v_ema, implementation=config.implementation)
    step = recorded_step(items, items.transition)
    kl = gaussian.kl(step.transition, v, items.v_ema, reduction=config.reduction)
    return loss + config.kl_ema_coef * _kl_factor(step, config) * kl
