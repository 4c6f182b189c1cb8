"""What the trainer must know of an objective: what it trains on, whose velocities it needs, what rewards are to it.

The formulas are in `core/`. An objective here is a frozen dataclass of its hyper-parameters that says the rest; the table at
the end is all there is to register.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fluvial.core import awm, distill, nft
from fluvial.core.checks import check_number
from fluvial.core.dpo import DpoInfo, dpo_info, dpo_loss
from fluvial.core.flow_matching import velocity_error
from fluvial.core.gaussian import Form, Reduction
from fluvial.core.policy import PolicyInfo, clipped_surrogate, dppo_surrogate, guard_surrogate
from fluvial.core.transitions import Transition
from fluvial.engines.rollout.items import Items
from fluvial.kernels import Implementation, nft_loss, policy_loss, step_log_prob

# What an update's items are: recorded (sample, step) pairs; clean samples with noise put on them anew; or pairs of samples,
# one of which is preferred, with the same noise put on both.
TrainsOn = Literal["steps", "noised", "preferences"]
# Whose velocity an objective compares with, besides the one that is trained: the policy before the update (old), the policy
# that training began with (ref), another model (teacher).
Other = Literal["old", "ref", "teacher"]
# What rewards are to an objective: advantages, an order within the group, or nothing.
Rewards = Literal["advantages", "order", "nothing"]


class LossConfig(NamedTuple):
    """What a loss is computed with, the same for all items of a run."""

    form: Form = "density"
    reduction: Reduction = "mean"
    kl_coef: float = 0.0
    kl_weight: Literal["rate", "exact"] = "rate"
    implementation: Implementation = "auto"


class ErrorInfo(NamedTuple):
    """Diagnostics of the objectives that fit a velocity, one number an item, without gradient."""

    error: Tensor  # what is fitted, before its weight
    kl_ref: Tensor  # the term that keeps the policy near the reference where there is one, else 0


class NftInfo(NamedTuple):
    """Diagnostics of DiffusionNFT, one number an item, without gradient."""

    drift: Tensor  # mean |v - v_old|^2
    kl_ref: Tensor


class Objective(Protocol):
    """An objective with its hyper-parameters."""

    trains_on: ClassVar[TrainsOn]
    compares_with: ClassVar[tuple[Other, ...]]
    # Whether a sample whose target_weight is 0 adds nothing to the loss, and need not be computed.
    skips_zero: ClassVar[bool]
    # Whether samples of target_weight 0 are left out of a KL, too, and of the count that the loss is divided by.
    mean_over_kept: ClassVar[bool]
    rewards: ClassVar[Rewards]
    has_ratio: ClassVar[bool]  # whether a log-probability is compared with an old one
    flows_only: ClassVar[bool]  # whether it is defined for models of a velocity alone

    @property
    def offline(self) -> bool:
        """Whether it learns from samples that are there already, and no rollout is made."""
        ...

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return what a sample's reward is to the loss, `[B]`: its advantage, a probability, whether it is learnt from."""
        ...

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, Any]:
        """Return the loss of each item, `[P]`, and diagnostics.

        Args:
            v: the policy's velocity at each item's sample.
            batch: the items, with the velocities that the objective needs.
            transition: of the recorded steps.
            config: of the run.
        """
        ...


class _Usual:
    """What most objectives have in common."""

    skips_zero: ClassVar[bool] = False
    mean_over_kept: ClassVar[bool] = False
    has_ratio: ClassVar[bool] = False
    flows_only: ClassVar[bool] = False

    @property
    def offline(self) -> bool:
        """Whether it learns from samples that are there already, and no rollout is made."""
        return False


class _FromAdvantage(_Usual):
    """Objectives whose loss is proportional to the advantage, by the ratio of two log-probabilities."""

    skips_zero: ClassVar[bool] = True
    rewards: ClassVar[Rewards] = "advantages"
    has_ratio: ClassVar[bool] = True

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        return advantage


class _FromAll(_Usual):
    """Objectives that learn from every sample alike."""

    rewards: ClassVar[Rewards] = "nothing"

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        return torch.ones_like(reward)


@dataclass(frozen=True)
class Clipped(_FromAdvantage):
    """The clipped surrogate of PPO and GRPO on recorded steps (arXiv 1707.06347, 2402.03300, 2505.05470).

    Args:
        clip_low: the ratio is clipped to [1 - clip_low, 1 + clip_high]; in nats a dimension when the log-probability's
            reduction is mean.
        clip_high: upper end of that range.
    """

    clip_low: float = 1e-3
    clip_high: float = 1e-3
    trains_on: ClassVar[TrainsOn] = "steps"
    compares_with: ClassVar[tuple[Other, ...]] = ()

    def __post_init__(self) -> None:
        check_number("objective", "clip_low", self.clip_low, low=0, high=1)
        check_number("objective", "clip_high", self.clip_high, low=0)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """As `kernels.policy_loss`."""
        step = _step(batch, transition)
        return policy_loss(
            step.transition, batch.x, v, step.x_next, log_prob_old=step.log_prob_old, advantage=batch.target_weight,
            clip_low=self.clip_low, clip_high=self.clip_high, v_ref=batch.v_ref, kl_coef=config.kl_coef,
            kl_weight=config.kl_weight, dt=step.dt, form=config.form, reduction=config.reduction,
            implementation=config.implementation,
        )  # fmt: skip


@dataclass(frozen=True)
class Guard(_FromAdvantage):
    """GRPO-Guard: a surrogate whose gradient has one size at every step of the schedule (arXiv 2510.22319).

    Args:
        clip: the normalised ratio is clipped to [1 - clip, 1 + clip].
    """

    clip: float = 1e-3
    trains_on: ClassVar[TrainsOn] = "steps"
    compares_with: ClassVar[tuple[Other, ...]] = ("old",)

    def __post_init__(self) -> None:
        check_number("objective", "clip", self.clip, low=0, high=1)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """As `policy.guard_surrogate`."""
        step, v_old = _step(batch, transition), _given(batch.v_old)
        log_prob, kl = _log_prob(v, batch, step, config)
        probs = (log_prob, step.log_prob_old, batch.target_weight)
        return _with_step_kl(*guard_surrogate(*probs, step.transition, v, v_old, step.dt, clip=self.clip), kl, step, config)


@dataclass(frozen=True)
class Dppo(_FromAdvantage):
    """Flow-DPPO: the plain surrogate, held back by the step's exact KL in place of a clip (arXiv 2606.11025).

    Args:
        kl_threshold: KL in nats a dimension from which a pair that moves on is held.
    """

    kl_threshold: float = 1e-5
    trains_on: ClassVar[TrainsOn] = "steps"
    compares_with: ClassVar[tuple[Other, ...]] = ("old",)

    def __post_init__(self) -> None:
        check_number("objective", "kl_threshold", self.kl_threshold, low=0)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """As `policy.dppo_surrogate`."""
        step, v_old = _step(batch, transition), _given(batch.v_old)
        log_prob, kl = _log_prob(v, batch, step, config)
        probs = (log_prob, step.log_prob_old, batch.target_weight)
        return _with_step_kl(
            *dppo_surrogate(*probs, step.transition, v, v_old, kl_threshold=self.kl_threshold), kl, step, config
        )


@dataclass(frozen=True)
class Distill(_FromAll):
    """On-policy distillation: from where the student came to, the step that a teacher would take (arXiv 2306.13649).

    Args:
        teacher: folder of the teacher's weights, as a run's export writes them.
        match: mean_kl (between the two Gaussian steps) or velocity_mse (which deterministic steps have too).
    """

    teacher: Path | None = None
    match: Literal["mean_kl", "velocity_mse"] = "mean_kl"
    trains_on: ClassVar[TrainsOn] = "steps"
    compares_with: ClassVar[tuple[Other, ...]] = ("teacher",)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """As `distill.mean_kl` or `distill.velocity_mse`."""
        v_teacher = _given(batch.v_teacher)
        if self.match == "velocity_mse":
            error = distill.velocity_mse(v, v_teacher)
        else:
            error = distill.mean_kl(_step(batch, transition).transition, v, v_teacher)
        return _with_velocity_kl(error, error, v, batch, config)


@dataclass(frozen=True)
class Nft(_Usual):
    """DiffusionNFT: on re-noised samples, towards the good ones and away from the bad ones (arXiv 2509.16117).

    The samples are drawn by the old policy, which follows the trained one after each rollout: old <- d old + (1 - d) policy,
    with d after n rollouts 0 (none), min(rise n, cap) (linear), or 0 for the first `delay` and then min(rise (n - delay),
    cap) (delayed). The published code has rise 0.001 and cap 0.5 for linear, delay 75, rise 0.0075 and cap 0.999 for
    delayed.

    Args:
        beta: how far the implicit policies lie from the old one.
        mode: how an advantage becomes the probability of being good, see `nft.reward_prob`.
        adv_clip: advantages are clipped to [-adv_clip, adv_clip].
        old: none, linear or delayed.
        old_rise: growth of d a rollout.
        old_cap: largest d.
        old_delay: rollouts before d grows.
        weight_min: least self-normalising weight.
    """

    beta: float = 0.1
    mode: nft.Mode = "all"
    adv_clip: float = 5.0
    old: Literal["none", "linear", "delayed"] = "linear"
    old_rise: float = 0.001
    old_cap: float = 0.5
    old_delay: int = 0
    weight_min: float = 1e-5
    trains_on: ClassVar[TrainsOn] = "noised"
    compares_with: ClassVar[tuple[Other, ...]] = ("old",)
    # A target_weight of 0 is a bad sample, not none.
    rewards: ClassVar[Rewards] = "advantages"
    flows_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("objective", "old_cap", self.old_cap, low=0, high=1)
        check_number("objective", "old_rise", self.old_rise, low=0)
        check_number("objective", "old_delay", self.old_delay, low=0)
        nft.check_nft_numbers(beta=self.beta, adv_clip=self.adv_clip, weight_min=self.weight_min)
        if self.old_cap == 1:
            raise ValueError("objective: old_cap is 1, and an old policy that decays by 1 never learns: use below 1")
        if self.old != "delayed" and self.old_delay:
            raise ValueError(f"objective: old_delay is {self.old_delay} and old is {self.old}: only delayed waits")

    def old_decay(self, rollouts: int) -> float:
        """Return d, the part of the old policy that stays after a number of rollouts."""
        if self.old == "none":
            return 0.0
        return min(self.old_rise * max(rollouts - self.old_delay, 0), self.old_cap)

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """The probability of being a good sample."""
        return nft.reward_prob(advantage, adv_clip=self.adv_clip, mode=self.mode)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, NftInfo]:
        """As `nft.nft_loss`."""
        v_old, x0 = _given(batch.v_old), _given(batch.x0)
        loss = nft_loss(
            v, v_old, x0, batch.x, batch.level, batch.target_weight, beta=self.beta, adv_clip=self.adv_clip,
            weight_min=self.weight_min, implementation=config.implementation,
        )  # fmt: skip
        loss, info = _with_velocity_kl(loss, loss, v, batch, config)
        return loss, NftInfo(velocity_error(v.detach(), v_old), info.kl_ref)


@dataclass(frozen=True)
class Awm(_FromAdvantage):
    """Advantage weighted matching: the policy gradient with the matching error for a log-probability (arXiv 2509.25050).

    Args:
        weighting: of the error by the noise level, see `awm.awm_log_prob`.
        clip_low: as of the clipped surrogate, which the two errors' difference goes through.
        clip_high: upper end.
        delta: of the two Huber weightings.
        power: of ghuber.
    """

    weighting: awm.Weighting = "ghuber"
    clip_low: float = 1e-3
    clip_high: float = 1e-3
    delta: float = 1e-5
    power: float = 0.25
    trains_on: ClassVar[TrainsOn] = "noised"
    compares_with: ClassVar[tuple[Other, ...]] = ("old",)
    flows_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("objective", "clip_low", self.clip_low, low=0, high=1)
        check_number("objective", "clip_high", self.clip_high, low=0)
        check_number("objective", "delta", self.delta, low=1e-12)
        check_number("objective", "power", self.power, low=1e-12, high=1)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, PolicyInfo]:
        """As `policy.clipped_surrogate` of `awm.awm_log_prob`."""
        target = _given(batch.target)
        log_prob, log_prob_old = (
            awm.awm_log_prob(
                velocity_error(policy, target), batch.level, weighting=self.weighting, delta=self.delta, power=self.power
            )
            for policy in (v, _given(batch.v_old))
        )
        loss, info = clipped_surrogate(
            log_prob, log_prob_old, batch.target_weight, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = _with_velocity_kl(loss, loss, v, batch, config)
        return loss, info._replace(kl_ref=kl.kl_ref)


@dataclass(frozen=True)
class Raft(_Usual):
    """Reward-filtered flow matching: fit the best samples of each group (RAFT, arXiv 2304.06767).

    Args:
        best: part of a group that is learnt from, at least one sample; groups whose rewards are all equal teach nothing.
    """

    best: float = 0.25
    trains_on: ClassVar[TrainsOn] = "noised"
    compares_with: ClassVar[tuple[Other, ...]] = ()
    skips_zero: ClassVar[bool] = True
    mean_over_kept: ClassVar[bool] = True
    rewards: ClassVar[Rewards] = "order"

    def __post_init__(self) -> None:
        check_number("objective", "best", self.best, low=1e-9, high=1)

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """1 for the best of each group, else 0."""
        better = (group == group[:, None]) & (reward > reward[:, None])
        equal = (group == group[:, None]) & (reward == reward[:, None]).tril()  # of equal ones the first counts
        size = (group == group[:, None]).sum(1)
        place = better.sum(1) + equal.sum(1)  # from 1
        spread = ((group == group[:, None]) & (reward != reward[:, None])).any(1)
        return ((place <= (self.best * size).clamp(min=1)) & spread).to(reward.dtype)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """As `flow_matching.velocity_error`, of what is kept."""
        error = velocity_error(v, _given(batch.target))
        return _with_velocity_kl(batch.target_weight * error, error, v, batch, config)


@dataclass(frozen=True)
class Sft(_FromAll):
    """Supervised fine-tuning: flow matching on the job's own data, without a rollout (arXiv 2210.02747)."""

    trains_on: ClassVar[TrainsOn] = "noised"
    compares_with: ClassVar[tuple[Other, ...]] = ()

    @property
    def offline(self) -> bool:
        """It is: the job's data."""
        return True

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
        """As `flow_matching.velocity_error`."""
        error = velocity_error(v, _given(batch.target))
        return _with_velocity_kl(error, error, v, batch, config)


@dataclass(frozen=True)
class Dpo(_FromAll):
    """Direct preference optimisation: fit the better of two samples more than the other (arXiv 2311.12908, 2501.13918).

    Online, the two are the best and the worst of each group of the rollout; with a file they are read from it.

    Args:
        beta: it takes in the number of steps that the bound sums over, thousands are usual.
        preferences: folder that `fluvial preferences` wrote: preferences.jsonl and its images; by default the pairs are
            the rollout's.
    """

    beta: float = 2000.0
    preferences: Path | None = None
    trains_on: ClassVar[TrainsOn] = "preferences"
    compares_with: ClassVar[tuple[Other, ...]] = ("ref",)
    rewards: ClassVar[Rewards] = "order"

    @property
    def offline(self) -> bool:
        """Whether there is a file of them."""
        return self.preferences is not None

    def __post_init__(self) -> None:
        check_number("objective", "beta", self.beta, low=1e-12)

    def loss(self, v: Tensor, batch: Items, transition: Transition | None, config: LossConfig) -> tuple[Tensor, DpoInfo]:
        """As `dpo.dpo_loss`; each item holds the preferred sample and the other, `[P, 2, *event]`."""
        target, v_ref = _given(batch.target), _given(batch.v_ref)
        errors = [velocity_error(of[:, i], target[:, i]) for of in (v, v_ref) for i in (0, 1)]
        return dpo_loss(*errors, beta=self.beta), dpo_info(*errors, beta=self.beta)


OBJECTIVES: dict[str, type] = {
    "clipped": Clipped,
    "guard": Guard,
    "dppo": Dppo,
    "distill": Distill,
    "nft": Nft,
    "awm": Awm,
    "raft": Raft,
    "sft": Sft,
    "dpo": Dpo,
}
# The table's values as one type, of which the command line shows the fields of the recipe's.
AnyObjective = Clipped | Guard | Dppo | Distill | Nft | Awm | Raft | Sft | Dpo


def name_of(objective: AnyObjective) -> str:
    """Return an objective's name in the table."""
    return next(name for name, kind in OBJECTIVES.items() if type(objective) is kind)


class _Step(NamedTuple):
    """The parts of recorded pairs that are always there."""

    x_next: Tensor
    log_prob_old: Tensor
    transition: Transition
    dt: Tensor


def _step(batch: Items, transition: Transition | None) -> _Step:
    assert transition is not None
    x_next, level_next = _given(batch.x_next), _given(batch.level_next)
    return _Step(x_next, _given(batch.log_prob_old), transition, level_next - batch.level)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _log_prob(v: Tensor, batch: Items, step: _Step, config: LossConfig) -> tuple[Tensor, Tensor | None]:
    return step_log_prob(
        step.transition, batch.x, v, step.x_next, v_ref=batch.v_ref, form=config.form, reduction=config.reduction,
        implementation=config.implementation,
    )  # fmt: skip


def _with_step_kl(
    loss: Tensor, info: PolicyInfo, kl: Tensor | None, step: _Step, config: LossConfig
) -> tuple[Tensor, PolicyInfo]:
    """Add the KL to the reference policy's step, exact or times |dt|, to a surrogate."""
    if kl is None:
        return loss, info
    scale = step.dt.abs() if config.kl_weight == "rate" else 1.0
    return loss + config.kl_coef * scale * kl, info._replace(kl_ref=kl.detach())


def _with_velocity_kl(loss: Tensor, error: Tensor, v: Tensor, batch: Items, config: LossConfig) -> tuple[Tensor, ErrorInfo]:
    """Add mean |v - v_ref|^2 to a loss on samples that no step led to."""
    if batch.v_ref is None:
        return loss, ErrorInfo(error.detach(), torch.zeros_like(error))
    kl = velocity_error(v, batch.v_ref)
    return loss + config.kl_coef * kl, ErrorInfo(error.detach(), kl.detach())
