"""Settings of a run's loss, KL terms and diagnostics, which the losses of objectives share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fluvial.core import gaussian
from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.policy import PolicyInfo
from fluvial.core.step import KLWeight, kl_factor
from fluvial.engines.run.declared import Follower, Networks, Start
from fluvial.engines.sampling.items import LastSteps, RecordedSteps, Rows
from fluvial.engines.sampling.samplers import SamplerRule
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
        any_size = (0, math.inf)
        check_fields(self, "kl", coef=any_size, ema_coef=any_size, ema_cap=(0, 0.999999), ema_rise=(0, 1), guidance=any_size)

    @property
    def is_on(self) -> bool:
        """Whether the loss has a KL term."""
        return self.coef > 0 or self.ema_coef > 0

    def ema_decay(self, rollouts: int, updates: int) -> float:
        """Return the share d of the moving average that stays after a number of rollouts and updates."""
        return min(self.ema_cap, self.ema_rise * updates)

    def networks(self) -> Networks:
        """Return the networks that the terms compare with: the reference, and a moving average of the policy."""
        found: Networks = {"ref": Start(self.guidance)} if self.coef > 0 else {}
        return found | ({"ema": Follower(self.ema_decay)} if self.ema_coef > 0 else {})

    def weight_of(self, sampler: SamplerRule) -> KLWeight:
        """Return the weight of the KL of a sampler's steps."""
        return sampler.kl_weight if self.weight == "auto" else self.weight


class LossConfig(NamedTuple):
    """Settings that every loss of a run is computed with."""

    form: Form = "density"  # form of the log-probabilities
    reduction: Reduction = "mean"  # their reduction over the event
    kl_coef: float = 0.0  # weight of the KL to the reference
    kl_weight: KLWeight = "rate"
    implementation: Implementation = "auto"  # see `kernels.dispatch.resolve`
    kl_ema_coef: float = 0.0  # weight of the KL to the moving average of the policy
    # (v, items) -> reward `[P]` with gradient; of methods that learn from gradients
    reward: Callable[[Tensor, LastSteps], Tensor] | None = None

    def error(self, v: Tensor, target: Tensor) -> Tensor:
        """Return `kernels.velocity_error`: mean |v - target|^2 of each item, `[P]`."""
        return velocity_error(v, target, implementation=self.implementation)


class ErrorInfo(NamedTuple):
    """Diagnostics of an objective that fits a prediction, one number per item, without gradient."""

    error: Tensor  # mean squared error or KL that is fitted, before the item's weight
    kl_ref: Tensor  # KL term to the reference, before its weight; 0 without one


def log_prob_and_kl(
    v: Tensor, items: RecordedSteps, config: LossConfig, *, v_ref: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each recorded step under a prediction, `[P]`, and its KL to that of v_ref, if any."""
    return step_log_prob(
        items.transition,
        items.x,
        v,
        items.x_next,
        v_ref=v_ref,
        form=config.form,
        reduction=config.reduction,
        implementation=config.implementation,
    )


def surrogate_and_kl(
    v: Tensor,
    items: RecordedSteps,
    config: LossConfig,
    surrogate: Callable[..., tuple[Tensor, PolicyInfo]],
    *steps: Any,
    **numbers: float,
) -> tuple[Tensor, PolicyInfo]:
    """Return a surrogate of recorded steps with the KL terms added, and its diagnostics with the KL to the reference's step.

    Args:
        v: the policy's prediction.
        items: recorded steps.
        config: settings of the loss.
        surrogate: `(log_prob, log_prob_old, advantage, *steps, **numbers) -> (loss, info)`, see `core.policy`.
        steps: its tensors besides the log-probabilities and the advantage.
        numbers: its hyper-parameters.
    """
    log_prob, kl = log_prob_and_kl(v, items, config, v_ref=items.predictions.get("ref"))
    loss, info = surrogate(log_prob, items.log_prob_old, items.signal, *steps, **numbers)
    if kl is not None:
        factor = kl_factor(items.transition, items.dt, config.kl_weight)
        loss, info = loss + config.kl_coef * factor * kl, info._replace(kl_ref=kl.detach())
    return add_ema_kl(loss, v, items, config), info


def add_velocity_kl(loss: Tensor, v: Tensor, items: Rows, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return a loss with the KL terms added, and mean |v - v_ref|^2 without gradient, 0 without a reference."""
    if "ref" not in items.predictions:
        return add_ema_kl(loss, v, items, config), torch.zeros_like(loss)
    kl = config.error(v, items.predictions["ref"])
    return add_ema_kl(loss + config.kl_coef * kl, v, items, config), kl.detach()


def fit_prediction(
    error: Tensor, v: Tensor, items: Rows, config: LossConfig, *, weight: Tensor | None = None
) -> tuple[Tensor, ErrorInfo]:
    """Return the loss that fits a prediction, weight error + kl_coef mean |v - v_ref|^2, and its diagnostics."""
    loss, kl = add_velocity_kl(error if weight is None else weight * error, v, items, config)
    return loss, ErrorInfo(error.detach(), kl)


def add_ema_kl(loss: Tensor, v: Tensor, items: Rows, config: LossConfig) -> Tensor:
    """Return a loss with the KL to the moving average of the policy added, if the run has one.

    As the KL to the reference, it is that of the Gaussian steps for recorded steps, else mean |v - v_ema|^2.
    """
    v_ema = items.predictions.get("ema")
    if v_ema is None:
        return loss
    if not isinstance(items, RecordedSteps):
        return loss + config.kl_ema_coef * config.error(v, v_ema)
    kl = gaussian.kl(items.transition, v, v_ema, reduction=config.reduction)
    return loss + config.kl_ema_coef * kl_factor(items.transition, items.dt, config.kl_weight) * kl
