"""Objectives that fit preferences: between pairs of samples, between their steps, and between the samples of a group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fluvial.core import dgpo
from fluvial.core.checks import check_fields
from fluvial.core.dgpo import DgpoInfo
from fluvial.core.dpo import D3poInfo, DpoInfo, best_and_worst, clipped_log_ratio, d3po_loss, dpo_loss
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.losses import LossConfig, add_velocity_kl, log_prob_and_kl
from fluvial.engines.methods.protocol import Follower, ObjectiveTraits, equal_weights, ramp, the_advantage
from fluvial.engines.sampling.items import NoisedSamples, Pairs, RecordedSteps

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig


def _dpo_needs(config: "TrainConfig", *, name: str = "dpo") -> Iterator[UsageError]:
    if config.kl.coef > 0:
        hint = f"{name} has the reference in its loss already; `objective.beta` weighs it"
        yield UsageError("kl.coef", config.kl.coef, "0", hint)


@dataclass(frozen=True)
class Dpo:
    """Diffusion-DPO: fit the preferred of two samples more than the other (arXiv 2311.12908, 2501.13918).

    Online, the two are the best and the worst sample of each group of a rollout. Offline, they are read from a folder.

    Args:
        beta: Inverse temperature of the preference, without a unit. It includes the number of steps of the bound, so that
            thousands are usual.
        lose_weight: Weight of the rejected sample in the margin. Below 1 a run diverges less easily, because the policy
            gains less from getting worse at rejected samples.
        preferences: Folder of preferences as `fluvial preferences` writes it (preferences.jsonl and its images), or records
            like those of Pick-a-Pic and HPD; without one the pairs come from the rollout.
    """

    beta: float = 2000.0
    lose_weight: float = 1.0
    preferences: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), lose_weight=(0, 1e6))

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """A folder of preferences makes the objective offline."""
        return ObjectiveTraits(
            trains_on="preferences",
            compares_with=("ref",),
            rewards="order",
            takes_implementation=True,
            offline=self.preferences is not None,
            preferences=self.preferences,
            refuses=_dpo_needs,
        )

    target_weight = equal_weights

    def loss(self, v: Tensor, items: Pairs, config: LossConfig) -> tuple[Tensor, DpoInfo]:
        """Return `dpo.dpo_loss`; an item holds the preferred sample and the other, `[P, 2, *event]`."""
        policies = v, items.predictions["ref"]
        errors = [config.error(each[:, i], items.target[:, i]) for each in policies for i in (0, 1)]
        return dpo_loss(*errors, beta=self.beta, lose_weight=self.lose_weight)


def _d3po_needs(config: "TrainConfig") -> Iterator[UsageError]:
    rollout = config.rollout
    if rollout.sampler.is_deterministic:
        expected = "ddim or flow_sde, whose steps have the log-probability that d3po needs"
        yield UsageError("rollout.sampler", rollout.sampler.kind, expected)
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "d3po's pairs belong together in one update")
    if rollout.trained.kind == "random":
        yield UsageError("rollout.trained", "random", "all or first", "d3po compares both samples at the same steps")
    yield from _dpo_needs(config, name="d3po")


@dataclass(frozen=True)
class D3po:
    """D3PO's loss: a preference between the best and the worst sample of a group, step by step (arXiv 2311.13231).

        -log sigmoid(beta (log clip(rho_best) - log clip(rho_worst))),  rho = p(x_next | x) / p_ref(x_next | x)

    Args:
        beta: Inverse temperature of the preference, without a unit.
        eps: Half-width of the clip of the ratio to the reference, which is per dimension.
    """

    beta: float = 0.1
    eps: float = 0.1
    traits = ObjectiveTraits(
        trains_on="steps",
        compares_with=("ref",),
        rewards="order",
        skips_zero=True,
        mean_over_kept=True,
        takes_implementation=True,
        gathers=True,
        refuses=_d3po_needs,
    )

    def __post_init__(self) -> None:
        check_fields(self, "objective", beta=(1e-12, math.inf), eps=(1e-12, 1 - 1e-6))

    def target_weight(self, reward: Tensor, advantage: Tensor, group: Tensor) -> Tensor:
        """Return 1 for the best sample of each group, -1 for the worst, else 0; groups with equal rewards have none."""
        found = best_and_worst(reward, group)
        out = torch.zeros_like(reward)
        out[found.win[found.valid]] = 1.0
        out[found.lose[found.valid]] = -1.0
        return out

    def statistic(self, v: Tensor, items: RecordedSteps) -> Tensor:
        """Return the clipped log-ratio of each step to the reference's."""
        return self._log_ratio(v, items, LossConfig())

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the clipped log-ratio of the other sample of each pair, `[B, S]`, 0 without a pair."""
        pairs = (group[:, None] == group) & (target_weight[:, None] * target_weight == -1)
        return pairs.to(statistic.dtype) @ statistic

    def loss(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> tuple[Tensor, D3poInfo]:
        """Return `dpo.d3po_loss`."""
        own, other, preferred = self._log_ratio(v, items, config), items.context, items.target_weight
        assert other is not None
        loss = d3po_loss(own, other, preferred, beta=self.beta)
        margin = (self.beta * preferred * (own - other)).detach()
        edge = (own.detach().exp() - 1).abs() >= self.eps * (1 - 1e-5)
        return 2 * loss, D3poInfo(self.beta * own.detach(), margin, (margin > 0).to(margin.dtype), edge.to(margin.dtype))

    def _log_ratio(self, v: Tensor, items: RecordedSteps, config: LossConfig) -> Tensor:
        both = v, items.predictions["ref"]
        log_prob, reference = (log_prob_and_kl(each, items, config, v_ref=None)[0] for each in both)
        return clipped_log_ratio(log_prob, reference, eps=self.eps)


def _dgpo_needs(config: "TrainConfig") -> Iterator[UsageError]:
    if not config.noising.is_shared:
        yield UsageError("noising.draw", config.noising.draw, "rollout", "dgpo compares samples at the same levels")
    if config.minibatches > 1:
        yield UsageError("minibatches", config.minibatches, "1", "dgpo's groups belong together in one update")
    if config.advantage.drop_zero:
        yield UsageError("advantage.drop_zero", True, "False", "dgpo weighs whole groups")


@dataclass(frozen=True)
class Dgpo:
    """DGPO's loss: a matching error, weighted by the advantage and by how little its group is preferred (arXiv 2510.08425).

        loss = w_g A |v - (noise - x0)|^2,  w_g = sigmoid(beta / G sum_g A (error - error_ref)),  both means over the event

    An old policy, a fast moving average, gives the ratio exp(error_old - error) that is clipped. After each rollout it
    becomes d old + (1 - d) policy, with d = min(old_rise (n - 1), old_cap) after n updates.

    Args:
        beta: Inverse temperature of the preference of a group, without a unit.
        clip_low: Lower half-width of the clip of the ratio; beyond it an item adds no gradient.
        clip_high: Upper half-width of the clip.
        old_rise: Growth of the decay d per update.
        old_cap: Largest decay d, below 1.
        old_samples_from: Number of updates after which the old policy makes the rollouts; None: the policy makes them.
        reference: Policy of error_ref: base (the one that training starts from) or old (TDM-R1, arXiv 2603.07700).
    """

    beta: float = 100.0
    clip_low: float = 1e-2
    clip_high: float = 1e-2
    old_rise: float = 0.001
    old_cap: float = 0.3
    old_samples_from: int | None = None
    reference: Literal["base", "old"] = "base"

    def __post_init__(self) -> None:
        any_size = (0, math.inf)
        own = {"old_rise": (0, 1), "old_cap": (0, 0.999999), "old_samples_from": any_size}
        check_fields(self, "objective", beta=(1e-12, math.inf), clip_low=(0, 1), clip_high=any_size, **own)

    @cached_property
    def traits(self) -> ObjectiveTraits:
        """The old policy is an adapter that follows the policy fast."""
        start = None if self.old_samples_from is None else self.old_samples_from + 1
        decay = partial(ramp, rise=self.old_rise, cap=self.old_cap, delay=1)
        return ObjectiveTraits(
            trains_on="noised",
            compares_with=("old", "ref"),
            flows_only=True,
            takes_kl=True,
            takes_implementation=True,
            gathers=True,
            followers=(Follower("old", decay, samples_from=start),),
            refuses=_dgpo_needs,
        )

    target_weight = the_advantage

    def statistic(self, v: Tensor, items: NoisedSamples) -> Tensor:
        """Return what each item adds to the argument of its group's sigmoid."""
        reference = items.predictions["ref" if self.reference == "base" else "old"]
        error, error_ref = (LossConfig().error(each, items.target) for each in (v, reference))
        return dgpo.preference_margin(error, error_ref, items.target_weight, beta=self.beta)

    def gathered(self, statistic: Tensor, target_weight: Tensor, group: Tensor, counts: Tensor) -> Tensor:
        """Return the weight of each sample's group at each level."""
        return dgpo.group_weight(statistic, group, counts=counts)

    def loss(self, v: Tensor, items: NoisedSamples, config: LossConfig) -> tuple[Tensor, DgpoInfo]:
        """Return `dgpo.dgpo_loss`."""
        assert items.context is not None
        error, error_old = (config.error(each, items.target) for each in (v, items.predictions["old"]))
        loss, info = dgpo.dgpo_loss(
            error, error_old, items.target_weight, items.context, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss, kl = add_velocity_kl(loss, v, items, config)
        return loss, info._replace(kl_ref=kl)
